"""Kernel implementations for TPUs: adapters to the kernels of JAX and tokamax."""
