"""Plans: the real training step, compiled for hardware that need not be here, and what that says of it."""
