"""Check the properties of a shrunk config: `axlearn prove`."""
