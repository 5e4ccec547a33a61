"""K-EXAONE for axlearn-core."""
