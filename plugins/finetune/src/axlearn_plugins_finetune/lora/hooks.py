"""Implement the hooks of this package. This module does not import JAX."""

from pathlib import Path
from urllib.parse import parse_qs

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_weights(uri: str) -> object | None:
    """Open exported adapters merged into their base: `DIR`, or `DIR?base=RUN` if the base has moved."""
    path, _, query = uri.partition("?")
    directory = Path(path).expanduser()
    if not (directory / "adapters.json").is_file():
        return None
    from axlearn_plugins_finetune.lora.weights import open_adapters

    return open_adapters(directory, base=parse_qs(query).get("base", [None])[0])
