"""Ahead-of-time compilation of the training step for hardware that is not present."""
