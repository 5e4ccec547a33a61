"""Nemotron for axlearn-core."""
