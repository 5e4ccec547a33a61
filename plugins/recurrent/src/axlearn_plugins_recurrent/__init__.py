"""Recurrent layers: gated DeltaNet, Kimi delta attention and Mamba-2, and the features that put them into a model."""
