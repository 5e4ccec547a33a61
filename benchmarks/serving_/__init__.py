"""Parts of the benchmark of servers."""
