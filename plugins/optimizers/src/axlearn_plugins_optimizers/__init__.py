"""Optimizers for axlearn beyond AdamW: the component `muon`."""

from axlearn_plugins_optimizers.muon import Muon

__all__ = ["Muon"]
