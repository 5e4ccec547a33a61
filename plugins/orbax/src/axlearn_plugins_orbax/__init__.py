"""Orbax as a checkpointer, and checkpoints of MaxText and Tunix in and out."""
