"""Code World Model for axlearn-core."""
