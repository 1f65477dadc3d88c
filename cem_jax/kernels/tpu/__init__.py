"""Fused kernels for TPUs: Pallas, through Mosaic. Other packages use only `attention`."""
