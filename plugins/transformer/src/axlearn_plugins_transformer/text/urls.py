"""Which URLs data is read from."""

from axlearn_core.errors import InputError, RequestError
from axlearn_core.plugins.manager import host

PROTOCOLS = ("file", "http", "https", "s3", "gs", "az", "abfs", "memory")
"""What is let through to fsspec. Others run commands, open archives, or take a file's text for a description of other files."""


def url_problem(path: str) -> str | None:
    """Why a path with `://` or `::` is not read; None for one that is, and for a local path."""
    if "://" not in path:
        return None
    if "::" in path:
        return "chains file systems of fsspec, which data is not read through"
    protocol = path.partition("://")[0]
    if protocol in PROTOCOLS or _is_stored(path):
        return None
    return f"has the protocol {protocol!r}, which data is not read by"


def check_url(url: str) -> None:
    """Raises `InputError` for a URL that is not read."""
    if problem := url_problem(url):
        raise InputError(f"{url!r} {problem}\n    expected: one of {', '.join(f'{p}://' for p in PROTOCOLS)}")


def _is_stored(url: str) -> bool:
    """Whether an installed plugin stores checkpoints there."""
    try:
        return host().only("axlearn_checkpoint_storage", uri=url) is not None
    except RequestError:
        return False
