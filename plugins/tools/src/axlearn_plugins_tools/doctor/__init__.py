"""`axlearn plugins doctor`: loads everything that is installed, and reports what is wrong with it."""
