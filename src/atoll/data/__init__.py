"""Data preparation, from images and captions to shards: sources, filters, encoding, and the built-in data sets."""
