"""Adapters that use modules from other libraries as layers."""
