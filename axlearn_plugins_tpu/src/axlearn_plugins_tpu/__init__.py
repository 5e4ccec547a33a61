"""TPUs: targets, mesh rules, remat policies and kernels."""
