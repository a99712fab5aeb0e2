"""Strangers build one model through an object store."""
