"""Llama experiments for axlearn-core."""
