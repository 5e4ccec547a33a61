"""Multi-host runs: a description of a job, and launchers that supervise it or submit it to a scheduler."""
