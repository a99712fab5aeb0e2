"""Weights that others have published in torch's own format, as tensors by name."""
