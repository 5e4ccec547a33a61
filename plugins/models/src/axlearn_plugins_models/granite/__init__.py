"""Granite for axlearn-core."""
