"""What the replaceable parts promise each other: protocols with shapes, axes and units. Imports no JAX at run time."""
