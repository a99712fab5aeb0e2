"""Engines, which run many jobs on one machine or on a cluster."""
