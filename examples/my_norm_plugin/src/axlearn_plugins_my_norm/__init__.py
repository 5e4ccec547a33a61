"""The layer dynamic tanh, a plugin for axlearn-core."""
