"""Runs: their directories, checkpoints, metrics, and the loop that trains."""
