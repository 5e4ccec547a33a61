"""Plans for a server's memory and speed on hardware that need not be present."""
