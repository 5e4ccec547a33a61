"""Recurrent layers (gated DeltaNet, Kimi delta attention, Mamba-2, gated convolutions) and features that put them into a model."""
