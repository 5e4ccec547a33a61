"""Solar Open for axlearn-core."""
