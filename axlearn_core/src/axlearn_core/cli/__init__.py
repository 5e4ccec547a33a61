"""The command line interface. Each command has its own module."""
