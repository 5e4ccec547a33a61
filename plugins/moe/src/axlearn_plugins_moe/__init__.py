"""Mixtures of experts for axlearn: the layer, its routers and dispatches, the feature `moe`, and upcycling."""
