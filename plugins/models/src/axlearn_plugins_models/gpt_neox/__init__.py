"""GPT-NeoX for axlearn-core."""
