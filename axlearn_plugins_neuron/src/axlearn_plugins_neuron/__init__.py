"""AWS Trainium: target, mesh rules, and attention by the Neuron SDK's kernels."""
