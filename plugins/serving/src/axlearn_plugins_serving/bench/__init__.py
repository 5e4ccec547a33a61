"""Measures a server of the OpenAI API."""
