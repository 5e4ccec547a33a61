"""Mistral and Mixtral for axlearn-core."""
