"""Atoll: train one text-to-image diffusion model on computers that never talk to each other."""

__version__ = "0.1.0"
