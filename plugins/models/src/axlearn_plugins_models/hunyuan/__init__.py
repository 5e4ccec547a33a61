"""Hunyuan for axlearn-core."""
