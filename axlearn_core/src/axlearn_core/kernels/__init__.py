"""Ops that layers call, their XLA reference implementations, and kernel selection."""
