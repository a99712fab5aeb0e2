"""Experts as one velocity field: from noise and a text to pictures."""
