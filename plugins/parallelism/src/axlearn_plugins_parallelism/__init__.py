"""Pipeline, context, sequence and expert parallelism for axlearn, and placement of the optimizer state, by config."""
