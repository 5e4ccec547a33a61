"""Apply the migrations of installed plugins to configs and checkpoints from earlier versions."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from axlearn_core.config import Names, get_fields
from axlearn_core.errors import PluginError
from axlearn_core.plugins.manager import host
from axlearn_core.plugins.registry import Registry
from axlearn_core.plugins.targets import load


def migrate_config(config: Mapping[str, Any], names: Names | None = None) -> Mapping[str, Any]:
    """Migrate a resolved config to the current version. See `axlearn_core.contracts.migration`.

    Args:
        config: Config as plain data, with the contents of `config.yaml`.
        names: Registry of the plugins (default: the registry of this process).

    Raises:
        ConfigError: If this version does not support the config.
        PluginError: If a plugin cannot be loaded.
    """
    for migrate in _load_functions("config", names):
        config = migrate(config)
    return config


def migrate_arrays(stored: Collection[str], expected: Collection[str]) -> dict[str, str | None]:
    """Return the new paths of arrays that were renamed since a checkpoint was written.

    Args:
        stored: Paths of the arrays in the checkpoint.
        expected: Paths of the arrays in this version.

    Returns:
        New path by stored path. The value is None if the array is dropped. Unchanged arrays are omitted.

    Raises:
        PluginError: If a plugin cannot be loaded.
    """
    new_paths: dict[str, str | None] = {}
    for migrate in _load_functions("arrays"):
        new_paths.update(migrate([path for path in stored if path not in new_paths], expected))
    return new_paths


def _load_functions(field: str, names: Names | None = None) -> Iterator[Any]:
    """Load the functions in the given field of all migrations."""
    plugins = host(names if isinstance(names, Registry) else None)
    for title, migrations in plugins.call("axlearn_migrations"):
        for migration in migrations:
            if location := get_fields(migration)[field]:
                try:
                    function = load(location)
                except (ImportError, AttributeError) as error:
                    raise PluginError(
                        f"{title}: the migration {migration.name!r} cannot be loaded from {location}: {error}"
                    ) from error
                yield function
