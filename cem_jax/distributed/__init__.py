"""Runs of several processes: joining, agreeing, and noticing who is missing."""
