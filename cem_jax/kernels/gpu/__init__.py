"""Fused kernels for GPUs: Pallas, through Triton. `attention` is what is used from outside."""
