"""Kernels for NVIDIA GPUs, as implementations of ops: adapters to cuDNN and tokamax."""
