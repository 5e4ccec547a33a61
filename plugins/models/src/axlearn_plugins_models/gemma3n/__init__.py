"""Gemma 3n for axlearn-core."""
