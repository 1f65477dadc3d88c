"""The training step compiled ahead of time for hardware that is not here."""
