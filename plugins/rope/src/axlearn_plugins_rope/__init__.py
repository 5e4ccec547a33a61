"""Rotary position embeddings for axlearn: the component `rope`, its length scalings, and the feature `rope`."""
