"""What the core asks of this package. It imports no JAX."""

from pathlib import Path

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_weights(uri: str) -> object | None:
    """The weights in a Hugging Face directory."""
    directory = Path(uri).expanduser()
    if not (directory / "config.json").is_file():
        return None
    from axlearn_plugins_models.huggingface.source import is_model
    from axlearn_plugins_models.huggingface.weights import open_directory

    return open_directory(directory) if is_model(directory) else None
