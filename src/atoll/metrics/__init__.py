"""Metrics of images and features: functions from arrays to numbers."""
