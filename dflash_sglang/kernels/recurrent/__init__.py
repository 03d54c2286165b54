"""Kernels over the states of a target's recurrent layers."""
