"""Triton kernels, each beside the plain-torch twin that defines it and serves where there is no GPU."""
