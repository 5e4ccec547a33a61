"""Plans of serving: what a machine that need not be here can serve, and how fast at most."""
