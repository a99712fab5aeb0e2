"""Frozen networks around the model: codecs, text encoders and feature networks."""
