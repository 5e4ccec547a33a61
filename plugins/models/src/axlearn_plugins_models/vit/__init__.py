"""Image classifiers made of transformer layers."""
