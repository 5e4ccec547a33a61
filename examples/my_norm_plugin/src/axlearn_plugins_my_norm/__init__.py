"""Dynamic tanh, a plugin for axlearn-core."""
