"""Search for the best layout of a training step: rank thousands of layouts with an analytic model, and compile the best."""
