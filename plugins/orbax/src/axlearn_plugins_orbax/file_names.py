"""The names of files that Orbax writes."""

METADATA = "_CHECKPOINT_METADATA"
"""In a checkpoint."""
TREE_METADATA = "_METADATA"
"""Beside the arrays of each tree."""
COMMITTED = "commit_success.txt"
"""The last file of a checkpoint in an object store."""
