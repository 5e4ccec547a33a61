"""Phi for axlearn-core."""
