"""`axlearn bench scale`: the cost of saving, restoring, joining and watching, per process, as a job grows."""
