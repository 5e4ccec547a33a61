"""StarCoder for axlearn-core."""
