"""Plots: charts, contact sheets and grids."""
