"""Low-rank adaptation for axlearn: the component `lora-linear`, the feature `lora`, the command `axlearn lora`."""
