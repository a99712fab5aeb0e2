"""Training in isolation: one loop for experts, the monolith, the router and students."""
