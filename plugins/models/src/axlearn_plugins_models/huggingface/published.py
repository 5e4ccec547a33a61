"""Models at the sizes that a published `config.json` gives, for experiments that train them from the beginning."""

from collections.abc import Mapping
from typing import Any

from axlearn_plugins_models.huggingface.family import family


def published(model_type: str, config_json: Mapping[str, Any]) -> Any:
    """The config of the model that a published `config.json` describes.

    The same table that imports weights makes the experiment, so that weights of that model always fit it.

    Args:
        model_type: of the family, such as `gemma2`.
        config_json: what the file says, by key.

    Raises:
        ConfigError: the family has no such variant, or a key is missing.
        ValueError: a key that the family does not read.
    """
    resolved, unread = family(model_type).resolve({"model_type": model_type, **config_json})
    if unread:
        raise ValueError(f"the family {model_type!r} does not read {', '.join(unread)} of this config.json")
    config: Any = resolved.config
    return config.model
