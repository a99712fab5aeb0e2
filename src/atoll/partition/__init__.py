"""Partitions of a data set: finding clusters by streaming k-means, and assigning rows to them."""
