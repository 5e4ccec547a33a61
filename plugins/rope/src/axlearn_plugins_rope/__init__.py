"""Rotary position embeddings: the component and feature `rope`, and length scalings."""
