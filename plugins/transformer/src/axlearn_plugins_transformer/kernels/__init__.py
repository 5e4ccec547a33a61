"""Ops of a transformer, with their XLA implementations."""
