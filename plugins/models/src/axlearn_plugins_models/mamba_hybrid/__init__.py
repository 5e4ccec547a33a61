"""Models with Mamba-2 in most layers: Granite 4 and Bamba."""
