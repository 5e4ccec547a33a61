"""Run listeners for jobs: lock, mirror, signals, lost processes, the compiled step, and time by phase."""
