"""The best layout of a training step, by an analytic model of thousands and the compiler's figures of the best."""
