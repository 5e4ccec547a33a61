"""A hook that opens checkpoint storage by URI. Imports a client only for its own scheme."""

from __future__ import annotations

from urllib.parse import urlsplit

from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import RequestError
from axlearn_core.plugins.hookspecs import hookimpl

FSSPEC = ("abfs", "az", "memory")
"""Protocols that are passed to fsspec. They can write a whole file atomically; `http://`, `ftp://` and `zip://` cannot."""


@hookimpl
def axlearn_checkpoint_storage(uri: str) -> Storage | None:
    """Return the storage for an `s3://` or `gs://` URI, or a URI with a protocol in `FSSPEC`; None for other schemes."""
    scheme = urlsplit(uri.partition("::")[0]).scheme if "://" in uri.partition("::")[0] else uri.partition("::")[0]
    if "::" in uri:
        raise RequestError(
            f"{uri!r} chains file systems of fsspec, which checkpoints do not support\n"
            f"    got: {scheme}::\n    expected: one of s3://, gs://, {', '.join(f'{p}://' for p in FSSPEC)}\n"
            "    fix: use the URI of the store itself"
        )
    if scheme not in ("s3", "gs", *FSSPEC):
        return None
    bucket, prefix = _split(uri)
    from axlearn_plugins_cloud.object_storage import ObjectStorage

    if scheme == "s3":
        from axlearn_plugins_cloud.s3 import S3Objects

        return ObjectStorage(S3Objects(bucket), uri, prefix)
    if scheme == "gs":
        from axlearn_plugins_cloud.gcs import GcsObjects

        return ObjectStorage(GcsObjects(bucket), uri, prefix)
    from axlearn_plugins_cloud.filesystem import FsspecObjects

    return ObjectStorage(FsspecObjects(scheme, bucket), uri, prefix)


def _split(uri: str) -> tuple[str, str]:
    """Split a URI into (bucket, prefix without surrounding slashes). Percent-encoding is not decoded."""
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    problem = None
    if not bucket:
        problem = "names no bucket"
    elif "@" in bucket or ":" in bucket:
        problem = "has credentials or a port instead of a bucket"
    elif ".." in prefix.split("/") or "//" in prefix.strip("/"):
        problem = "has an empty or `..` part in its path"
    if problem:
        raise RequestError(
            f"{_hide(uri)!r} {problem}\n    expected: SCHEME://BUCKET/PATH\n    fix: use a bucket and a path in it; "
            "credentials and endpoints come from the environment"
        )
    return bucket, prefix.strip("/")


def _hide(uri: str) -> str:
    """Return the URI without credentials."""
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else uri
