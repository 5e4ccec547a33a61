"""Mixtures of experts of ERNIE 4.5 for axlearn-core."""
