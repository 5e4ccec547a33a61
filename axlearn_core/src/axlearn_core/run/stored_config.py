"""Read the config file of a run, and locate its checkpoints. This module does not import JAX."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.checkpoint.storage import open_storage
from axlearn_core.config import Node
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError, ConfigError, MissingFileError
from axlearn_core.plugins.code_names import CodeNames, restore_values
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import read_text
from axlearn_core.run.asset_copies import Place, attach_assets
from axlearn_core.run.record import CONFIG

CHECKPOINTS = "checkpoints"


def read_run_config(
    storage: Storage, uri: str | Path, path: str = CONFIG, *, places: Sequence[Place] | None = None
) -> Node[Any] | None:
    """Read the resolved config of a run, with asset paths that can be opened. Return None if the file does not exist.

    Args:
        storage: Storage of the file.
        uri: URI of the storage, for use in error messages.
        path: Path of the file in the storage.
        places: Folders to search for the run's assets (default: the folder of the file).

    Raises:
        CheckpointError: If the file cannot be read, or if an asset of the run is missing.
    """
    file = f"{uri}/{path}"
    try:
        text = storage.read(path).decode()
        request = read_text(text, file, CodeNames(registry()))
    except MissingFileError:
        return None
    except ConfigError as error:
        raise CheckpointError(f"{file} does not match the installed packages:\n{error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not a text file: {error}") from None
    if not isinstance(request.experiment, Node):
        raise CheckpointError(f"{file} is a run file, not the resolved config of a run (it lacks `resolved: true`)")
    try:
        config = restore_values(request.experiment)
    except ConfigError as error:
        raise CheckpointError(f"{file} cannot be read by this process:\n{error}") from error
    return attach_assets(config, file, places or [(storage, path.removesuffix(CONFIG))])


def find_checkpoints(uri: str | Path, storage: Storage, checkpoint_uri: str | None) -> Checkpoints:
    """Return the checkpoints folder of the run at `uri`. `checkpoint_uri` is `checkpointer.uri` in its config."""
    if checkpoint_uri is not None:
        return Checkpoints(open_storage(checkpoint_uri), checkpoint_uri)
    return Checkpoints(storage, f"{uri}/{CHECKPOINTS}", f"{CHECKPOINTS}/")
