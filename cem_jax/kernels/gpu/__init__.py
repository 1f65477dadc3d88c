"""Fused kernels for GPUs: Pallas, through Triton. Other packages use only `attention`."""
