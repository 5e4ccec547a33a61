"""Hook implementations of this package. This module does not import JAX."""

from pathlib import Path

from axlearn_core.plugins.hookspecs import hookimpl


@hookimpl
def axlearn_weights(uri: str) -> object | None:
    """Return the weights of a Hugging Face directory or of a name on the hub, or None if it is neither."""
    from axlearn_plugins_models.huggingface.hub import parse_name

    directory = Path(uri).expanduser()
    on_hub = parse_name(uri) is not None
    if not on_hub and not (directory / "config.json").is_file():
        return None
    from axlearn_plugins_models.huggingface.source import is_model
    from axlearn_plugins_models.huggingface.weights import open_directory

    return open_directory(uri) if on_hub or is_model(directory) else None
