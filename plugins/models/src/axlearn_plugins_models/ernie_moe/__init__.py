"""ERNIE 4.5 mixture-of-experts models for axlearn-core."""
