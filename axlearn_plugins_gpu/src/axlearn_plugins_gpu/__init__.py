"""NVIDIA GPUs: targets, mesh rules, remat policies and kernels."""
