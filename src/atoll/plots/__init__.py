"""Pictures for people: contact sheets and grids."""
