"""Kernel implementations for NVIDIA GPUs: adapters to cuDNN, tokamax and Pallas."""
