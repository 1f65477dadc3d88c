"""Causal Energy Minimization in JAX: Transformer layers as gradient steps on explicit energies."""
