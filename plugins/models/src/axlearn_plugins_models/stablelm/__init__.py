"""StableLM for axlearn-core."""
