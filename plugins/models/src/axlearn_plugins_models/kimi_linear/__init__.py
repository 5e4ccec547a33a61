"""Kimi Linear: Kimi delta attention in most layers, and latent attention without positions in the others."""
