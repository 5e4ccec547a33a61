"""Low-rank adaptation: the `lora-linear` component, the `lora` feature and the `axlearn lora` command."""
