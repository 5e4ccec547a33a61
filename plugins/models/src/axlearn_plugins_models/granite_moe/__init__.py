"""Granite mixture-of-experts models for axlearn-core."""
