"""Layers on flax.nnx, built from config nodes."""

from axlearn_core.nn.layer import Layer

__all__ = ["Layer"]
