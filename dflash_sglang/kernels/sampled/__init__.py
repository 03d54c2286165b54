"""Kernels of rejection sampling."""
