"""Seed-OSS for axlearn-core."""
