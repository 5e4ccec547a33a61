"""OLMo for axlearn-core."""
