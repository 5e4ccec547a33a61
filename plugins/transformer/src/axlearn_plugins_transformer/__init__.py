"""Transformers for axlearn-core: attention, feed-forward layers, the decoder, the causal language model, generation."""
