"""Arcee for axlearn-core."""
