"""Everyday tools: features such as remat and EMA, optimizers, reports and trackers, evaluation, `axlearn plugins new` and `doctor`."""
