"""GPT-2 for axlearn-core."""
