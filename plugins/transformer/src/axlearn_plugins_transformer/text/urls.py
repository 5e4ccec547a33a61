"""Restrictions on the URLs from which data may be read."""

from axlearn_core.errors import InputError, RequestError
from axlearn_core.plugins.manager import host

PROTOCOLS = ("file", "http", "https", "s3", "gs", "az", "abfs", "memory")
"""Protocols allowed for fsspec. Other protocols can run commands, open archives, or read a file as a list of other files."""


def url_problem(path: str) -> str | None:
    """Return why a URL is not allowed, or None if it is allowed or the path is local."""
    if "://" not in path:
        return None
    if "::" in path:
        return "chains fsspec file systems, which is not allowed for data"
    protocol = path.partition("://")[0]
    if protocol in PROTOCOLS or _is_stored(path):
        return None
    return f"has the protocol {protocol!r}, which is not allowed for data"


def check_url(url: str) -> None:
    """Raise InputError if a URL is not allowed."""
    if problem := url_problem(url):
        raise InputError(f"{url!r} {problem}\n    expected: one of {', '.join(f'{p}://' for p in PROTOCOLS)}")


def _is_stored(url: str) -> bool:
    """Return whether an installed plugin stores checkpoints at this URL."""
    try:
        return host().call_single("axlearn_checkpoint_storage", uri=url) is not None
    except RequestError:
        return False
