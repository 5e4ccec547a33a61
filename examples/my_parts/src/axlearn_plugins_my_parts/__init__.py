"""One part for each slot, a plugin for axlearn-core."""
