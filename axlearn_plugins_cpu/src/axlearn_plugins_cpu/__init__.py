"""Kernels in C++ for CPUs."""
