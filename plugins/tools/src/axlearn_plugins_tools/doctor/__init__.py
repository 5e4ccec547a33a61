"""`axlearn plugins doctor`: loads everything that is installed and reports errors."""
