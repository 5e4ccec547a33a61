"""Cohere for axlearn-core."""
