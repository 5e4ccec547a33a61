"""AWS Trainium: target, mesh rules, and attention with the Neuron SDK's kernels."""
