"""DeepSeek-V2 and DeepSeek-V3 for axlearn-core."""
