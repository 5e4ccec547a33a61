"""Kernels for TPUs: adapters to those that JAX and tokamax ship."""
