"""Mixtures of experts: the layer, its routers and dispatches, and upcycling."""
