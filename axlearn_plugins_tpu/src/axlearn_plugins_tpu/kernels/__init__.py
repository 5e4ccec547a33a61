"""Kernels for TPUs: adapters to those that JAX ships."""
