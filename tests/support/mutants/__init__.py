"""Wrong implementations, each of which its suite must catch."""
