"""Layers of other libraries."""
