"""Features for common changes to an experiment. Each feature has its own module."""
