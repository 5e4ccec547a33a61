"""Calls of the kernels in `native/`, as kernels of ops."""
