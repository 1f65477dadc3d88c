"""Regression of functions drawn from Gaussian processes (Table 3)."""
