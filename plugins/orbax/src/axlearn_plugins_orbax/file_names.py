"""Names of files that Orbax writes."""

METADATA = "_CHECKPOINT_METADATA"
"""Metadata file of a checkpoint."""
TREE_METADATA = "_METADATA"
"""Metadata file of a tree, next to its arrays."""
COMMITTED = "commit_success.txt"
"""File that Orbax writes last in an object store, when a checkpoint is complete."""
