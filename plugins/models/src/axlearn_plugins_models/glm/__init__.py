"""GLM for axlearn-core."""
