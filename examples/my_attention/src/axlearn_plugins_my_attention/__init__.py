"""Attention with an output gate, a plugin for axlearn-core."""
