"""Kernels over the blocks of a step: built, packed, convolved, accepted."""
