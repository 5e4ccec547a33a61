"""Hook implementations of this package. This module does not import JAX."""

from pathlib import Path

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_weights(uri: str) -> object | None:
    """Return the weights of a Hugging Face directory, or None if it is not one."""
    directory = Path(uri).expanduser()
    if not (directory / "config.json").is_file():
        return None
    from axlearn_plugins_models.huggingface.source import is_model
    from axlearn_plugins_models.huggingface.weights import open_directory

    return open_directory(directory) if is_model(directory) else None
