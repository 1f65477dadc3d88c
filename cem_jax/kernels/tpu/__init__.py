"""Fused kernels for TPUs: Pallas, through Mosaic. `attention` is what is used from outside."""
