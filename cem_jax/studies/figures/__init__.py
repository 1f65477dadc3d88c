"""Sweeps over a figure's arms, and reports of their runs."""
