"""The policy-gradient objective, and the terms that it is composed of."""
