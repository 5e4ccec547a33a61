"""SmolLM for axlearn-core."""
