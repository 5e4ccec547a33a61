"""How a plugin reads what its earlier versions wrote. Imports no JAX."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import attrs


class ConfigMigration(Protocol):
    """Brings a resolved config up to date."""

    def __call__(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config as this version writes it; one of this version comes back as it is.

        Args:
            config: plain data, as in `config.yaml`: mappings with `type`, lists and scalars. It is not changed.

        Raises:
            ConfigError: the config says something that this version cannot do.
        """
        ...


class ArrayMigration(Protocol):
    """Finds the arrays of an earlier version in a checkpoint."""

    def __call__(self, stored: Collection[str], expected: Collection[str]) -> Mapping[str, str | None]:
        """Stored path -> the path that the array has in this version, or None where this version has no use for it.

        Arrays that the migration does not name keep their paths.

        Args:
            stored: the dotted paths in the checkpoint, such as `params.decoder.norm.weight`.
            expected: the paths of the training state at hand, or those of its weights.
        """
        ...


@attrs.frozen(kw_only=True)
class Migration:
    """A change of what a plugin writes, declared through `axlearn_migrations`.

    Attributes:
        name: what changed, for people.
        config: `"module:function"` of a `ConfigMigration`; empty where configs did not change. It gets every resolved
            config that is read, so that its module should import no JAX.
        arrays: `"module:function"` of an `ArrayMigration`; empty where checkpoints did not change. It is asked when a
            checkpoint lacks arrays that are wanted.
    """

    name: str
    config: str = ""
    arrays: str = ""
