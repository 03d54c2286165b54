"""Kernels beside SGLang's attention."""
