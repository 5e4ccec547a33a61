"""Layers that are based on flax.nnx and built from config nodes."""

from axlearn_core.nn.layer import Layer

__all__ = ["Layer"]
