"""Rotary position embeddings as a feature of axlearn-core."""
