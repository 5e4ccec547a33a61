"""Features such as remat and EMA, optimizers, reports, trackers, evaluation, and tools for plugin authors."""
