"""The command line interface. Each command has a module."""
