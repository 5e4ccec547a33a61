"""Parallelism for axlearn by config alone: pipelines, long contexts, sequences between blocks, experts, optimizer state."""
