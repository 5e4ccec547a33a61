"""Gemma 4 for axlearn-core."""
