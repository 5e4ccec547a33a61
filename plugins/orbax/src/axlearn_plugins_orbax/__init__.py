"""An Orbax checkpointer, and import and export of MaxText and Tunix checkpoints."""
