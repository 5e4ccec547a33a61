"""Llama 4 for axlearn-core."""
