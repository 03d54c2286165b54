"""Kernels over a head's rows and logits."""
