"""Prove a config before it runs, and replay a step of a run."""
