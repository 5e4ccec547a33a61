"""Find installed plugins, call their hooks, and resolve requests to configs. This package does not import JAX."""
