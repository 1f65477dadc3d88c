"""The commands of `cem`, one module each."""
