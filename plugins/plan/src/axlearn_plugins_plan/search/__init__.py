"""Search for the best layout of a training step: rank thousands with an analytic model, and compile the best."""
