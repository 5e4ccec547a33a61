"""Variants of attention for axlearn: the features `mla`, `alibi` and `interleave`, and their layers."""
