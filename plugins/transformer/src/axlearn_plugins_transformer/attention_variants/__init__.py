"""Attention variants: the features `mla`, `alibi` and `interleave`, and their layers."""
