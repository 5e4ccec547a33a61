"""Mixtures of experts of Granite for axlearn-core."""
