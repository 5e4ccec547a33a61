"""Run a step of a run again: `axlearn replay`."""
