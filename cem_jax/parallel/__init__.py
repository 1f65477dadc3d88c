"""Devices as a mesh, and where each array lies on it."""
