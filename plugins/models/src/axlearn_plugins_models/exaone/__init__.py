"""EXAONE 4 for axlearn-core."""
