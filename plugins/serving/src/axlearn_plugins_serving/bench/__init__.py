"""A benchmark for OpenAI-compatible servers."""
