"""Checkpoint storage in object stores: `s3://`, `gs://`, and some fsspec protocols."""
