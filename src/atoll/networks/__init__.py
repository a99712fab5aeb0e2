"""The networks that are trained: the expert, the router, and what they are stored as."""
