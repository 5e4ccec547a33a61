"""Arcee's AFM for axlearn-core."""
