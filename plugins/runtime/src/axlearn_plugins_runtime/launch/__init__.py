"""Runs on many machines: one description of a job, and launchers that supervise it or hand it to a scheduler."""
