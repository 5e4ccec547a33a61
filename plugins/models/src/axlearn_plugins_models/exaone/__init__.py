"""EXAONE for axlearn-core."""
