"""Train, assemble and judge: the demo, `evaluate` and the papers' comparisons."""
