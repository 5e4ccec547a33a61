"""StarCoder 2 for axlearn-core."""
