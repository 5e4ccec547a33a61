"""What the core asks of this package. It imports no JAX."""

from pathlib import Path

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_load(directory: Path) -> object | None:
    """The model in a Hugging Face directory."""
    if not (directory / "config.json").is_file():
        return None
    from axlearn_plugins_huggingface.runs import load
    from axlearn_plugins_huggingface.source import is_model

    return load(directory) if is_model(directory) else None
