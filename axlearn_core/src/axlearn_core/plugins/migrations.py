"""Configs and checkpoints of earlier versions, by the migrations of the installed plugins."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from axlearn_core.config import Names, fields_of
from axlearn_core.errors import PluginError
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import Registry
from axlearn_core.plugins.targets import load


def migrate_config(config: Mapping[str, Any], names: Names | None = None) -> Mapping[str, Any]:
    """A resolved config, as plain data, brought up to date; see `axlearn_core.contracts.migration`.

    Args:
        config: as in `config.yaml`.
        names: the registry whose plugins are asked; by default that of this process.

    Raises:
        ConfigError: it says something that this version cannot do.
        PluginError: a plugin cannot be loaded.
    """
    for migrate in _functions("config", names):
        config = migrate(config)
    return config


def migrate_arrays(stored: Collection[str], expected: Collection[str]) -> dict[str, str | None]:
    """Stored path -> path of this version, for the arrays of a checkpoint that have another one or are left out (None).

    Raises:
        PluginError: a plugin cannot be loaded.
    """
    renamed: dict[str, str | None] = {}
    for migrate in _functions("arrays"):
        renamed.update(migrate([path for path in stored if path not in renamed], expected))
    return renamed


def _functions(field: str, names: Names | None = None) -> Iterator[Any]:
    """The functions that the plugins' migrations name in a field."""
    plugins = host(names if isinstance(names, Registry) else None)
    for title, migrations in plugins.answers("axlearn_migrations"):
        for migration in migrations:
            if location := fields_of(migration)[field]:
                try:
                    function = load(location)
                except (ImportError, AttributeError) as error:
                    raise PluginError(
                        f"{title}: the migration {migration.name!r} cannot be loaded from {location}: {error}"
                    ) from error
                yield function
