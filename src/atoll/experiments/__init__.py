"""Experiments that train, assemble and evaluate: the demo, `evaluate`, the papers' comparisons, and `doctor`."""
