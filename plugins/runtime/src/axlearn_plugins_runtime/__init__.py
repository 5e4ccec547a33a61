"""Resilience of training runs: a watchdog, local checkpoints, corruption checks, run listeners and launchers."""
