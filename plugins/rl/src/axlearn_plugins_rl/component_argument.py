"""Components as arguments of commands."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import Decoder, Node, check, parse, patch
from axlearn_core.config.files import read_regular
from axlearn_core.config.types import show
from axlearn_core.errors import ConfigError, Problem, RequestError, reason
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import is_file, parse_feature, parse_setting


def read_component(text: str, option: str) -> Node[Any]:
    """Return the config of a component.

    Args:
        text: A registered name with settings, such as `reasoning-gym:dataset=basic_arithmetic`, or the path of a YAML file with
            `type` and settings.
        option: The command-line option, for use in error messages.

    Raises:
        RequestError: The component is unknown, or the file cannot be read.
        ConfigError: A setting is invalid.
    """
    if is_file(text.partition(":")[0]):
        return _read_file(text)
    use = parse_feature(text, option)
    return _decode({"type": use.name, **use.options}, use.location)


def _read_file(path: str) -> Node[Any]:
    try:
        content = read_regular(Path(path)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {reason(error)}") from None
    document = parse(content, path)
    if not isinstance(document.data, Mapping) or "type" not in document.data:
        raise ConfigError(
            Problem(
                path="",
                message="is not a component",
                got=show(document.data),
                expected="a mapping with `type`, such as {type: jsonl-task, paths: train.jsonl}",
                location=path,
            )
        )
    try:
        return _decode(document.data, None)
    except ConfigError as error:
        raise ConfigError(p if p.location else document.locate(p) for p in error.problems) from None


def _decode(data: Mapping[str, Any], location: str | None) -> Node[Any]:
    try:
        config = Decoder(registry()).decode(data, Node)
        check(config)
    except ConfigError as error:
        raise ConfigError(attrs.evolve(p, location=p.location or location) for p in error.problems) from None
    return config


def set_values(config: Node[Any], settings: Sequence[str]) -> Node[Any]:
    """Return a config with other values.

    Args:
        config: The config.
        settings: Settings as `PATH=VALUE`. The values are YAML.

    Raises:
        RequestError: A setting has a different form.
        ConfigError: A path is unknown, or a value is invalid.
    """
    parsed = [parse_setting(text) for text in settings]
    decode = Decoder(registry()).decode_value
    for setting in parsed:
        try:
            config = patch(config, {setting.path: setting.value}, decode)
        except ConfigError as error:
            raise ConfigError(attrs.evolve(p, location=setting.location) for p in error.problems) from None
    check(config)
    return config
