"""A model that reads images and text, a plugin for axlearn-core."""
