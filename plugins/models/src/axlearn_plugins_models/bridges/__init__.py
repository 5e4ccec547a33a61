"""Adapters that use modules of other libraries as layers."""
