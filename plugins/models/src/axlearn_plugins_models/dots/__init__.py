"""dots.llm1 for axlearn-core."""
