"""An engine with continuous batching, and an OpenAI-compatible server."""
