"""Sampling: experts as one velocity field, from noise and text to images."""
