"""`axlearn plugins new`: a plugin package to begin with."""
