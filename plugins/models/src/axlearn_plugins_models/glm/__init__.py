"""GLM-4 for axlearn-core."""
