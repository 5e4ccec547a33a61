"""LFM2, with gated short convolutions and attention."""
