"""Kernels that norm, rotate and write context keys and values."""
