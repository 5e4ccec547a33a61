"""A benchmark of OpenAI-compatible servers."""
