"""Transformers: attention, feed-forward layers, causal language model, generation."""
