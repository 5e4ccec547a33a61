"""The first OLMo for axlearn-core."""
