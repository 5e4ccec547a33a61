"""The plugin host: what is installed, what it says, and how a request becomes a config. Imports no JAX."""
