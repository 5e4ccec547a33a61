"""Serving of language models: an engine with continuous batching, and an OpenAI-compatible server."""
