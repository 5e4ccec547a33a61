"""Ops that layers call, their XLA reference implementations, and the selection among implementations."""
