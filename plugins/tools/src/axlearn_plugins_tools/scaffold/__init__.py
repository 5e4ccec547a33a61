"""`axlearn plugins new`: create a plugin package from a template."""
