"""The `linear_attention` op and its kernels."""
