"""The ops of a transformer, with their XLA implementations: attention over symbolic masks, and cross-entropy."""
