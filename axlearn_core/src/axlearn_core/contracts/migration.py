"""Migrations of configs and checkpoints from earlier versions of a plugin. This module does not import JAX."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import attrs


class ConfigMigration(Protocol):
    """Migrates a resolved config to the current version."""

    def __call__(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the config in the format of this version. A config that already has this format is returned unchanged.

        Args:
            config: Plain data as in `config.yaml`: mappings with `type`, lists, and scalars. Do not modify it.

        Raises:
            ConfigError: If this version cannot express the config.
        """
        ...


class ArrayMigration(Protocol):
    """Maps the arrays of a checkpoint from an earlier version to their current paths."""

    def __call__(self, stored: Collection[str], expected: Collection[str]) -> Mapping[str, str | None]:
        """Map the stored path of each renamed array to its current path, or to None if this version does not need the array.

        Arrays that are not in the result keep their paths.

        Args:
            stored: Dotted paths in the checkpoint, such as `params.decoder.norm.weight`.
            expected: Dotted paths in the training state, or in its weights.
        """
        ...


@attrs.frozen(kw_only=True)
class Migration:
    """A change to a plugin's format, declared in `axlearn_migrations`.

    Attributes:
        name: Human-readable description of the change.
        config: `"module:function"` of a `ConfigMigration`, or empty. It is called for every config that is read, so its
            module should not import JAX.
        arrays: `"module:function"` of an `ArrayMigration`, or empty. It is called if a checkpoint lacks expected arrays.
    """

    name: str
    config: str = ""
    arrays: str = ""
