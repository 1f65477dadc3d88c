"""Multi-process runs: joining, agreeing, and noticing missing processes."""
