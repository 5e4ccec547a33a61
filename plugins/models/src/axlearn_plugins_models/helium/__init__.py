"""Helium for axlearn-core."""
