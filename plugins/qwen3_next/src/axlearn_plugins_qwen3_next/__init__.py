"""Qwen3-Next, a plugin for axlearn-core."""
