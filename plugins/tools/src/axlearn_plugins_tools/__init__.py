"""Everyday tools: features such as remat and EMA, optimizers, reports and trackers, evaluation, new plugins, their doctor."""
