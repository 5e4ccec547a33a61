"""Protocols between the replaceable parts, with shapes, axes and units. This package does not import JAX at run time."""
