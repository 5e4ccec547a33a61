"""Storages in object stores: `s3://`, `gs://`, and what fsspec reaches."""
