"""Low-rank adaptation: the component `lora-linear`, the feature `lora` and the command `axlearn lora`."""
