"""From images and captions to shards: sources, codecs, text, features, and the built-in data sets."""
