"""What runs many jobs."""
