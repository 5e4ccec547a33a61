"""MiniMax-M2 for axlearn-core."""
