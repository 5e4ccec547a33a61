"""Qwen 2.5 and Qwen 3 for axlearn-core."""
