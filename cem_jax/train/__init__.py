"""Training: step, optimizer, loop, checkpoints and metrics."""
