"""Hunyuan-A13B for axlearn-core."""
