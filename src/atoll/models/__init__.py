"""The networks: the expert, the router, their sizes by name, and how they are kept on disk."""
