"""Model configs with the sizes of a published `config.json`, for experiments that train from scratch."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from axlearn_core.plugins.registry import Registry, registry
from axlearn_plugins_models.huggingface.family import family


def published_model(model_type: str, config_json: Mapping[str, Any]) -> Any:
    """Return the config of the model that a published `config.json` describes.

    The experiment uses the same table as the import, so weights of that model always fit it.

    Args:
        model_type: Family, such as `gemma2`.
        config_json: Content of the file, by key.

    Raises:
        ConfigError: If the family does not support a value, or a key is missing.
        ValueError: If the family does not read a key.
    """
    return _published_model(registry(), model_type, json.dumps(config_json, sort_keys=True))


@functools.lru_cache(maxsize=256)
def _published_model(names: Registry, model_type: str, config_json: str) -> Any:
    """Return the config. Cached by registry, because other plugins may resolve the model differently."""
    resolved, unread = family(model_type).resolve({"model_type": model_type, **json.loads(config_json)})
    if unread:
        raise ValueError(f"the family {model_type!r} does not read these keys of config.json: {', '.join(unread)}")
    config: Any = resolved.config
    return config.model
