"""A confidence penalty, a plugin for axlearn-core."""
