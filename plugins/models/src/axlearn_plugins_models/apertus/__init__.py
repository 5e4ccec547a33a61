"""Apertus for axlearn-core."""
