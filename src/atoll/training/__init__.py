"""Training in isolation: one loop for experts, the monolith and the router."""
