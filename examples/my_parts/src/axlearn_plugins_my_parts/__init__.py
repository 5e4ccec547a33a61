"""Example components for each slot, a plugin for axlearn-core."""
