"""ERNIE for axlearn-core."""
