"""OLMoE for axlearn-core."""
