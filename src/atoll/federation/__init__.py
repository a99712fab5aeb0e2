"""Lets strangers build one model together through an object store."""
