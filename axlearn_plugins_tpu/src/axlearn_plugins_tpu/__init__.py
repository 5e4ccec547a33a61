"""TPUs: what they are, how programs are laid out on them, and kernels."""
