"""The everyday features of axlearn, each a config modifier in a module of its own."""
