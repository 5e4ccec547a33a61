"""Plans of a server's memory and speed, for hardware that need not be present."""
