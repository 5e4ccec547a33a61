"""The config file of a run, and where it says that the checkpoints are. Imports no JAX itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.checkpoint.storage import open_storage
from axlearn_core.config import Node
from axlearn_core.contracts.storage import Storage
from axlearn_core.errors import CheckpointError, ConfigError, MissingFileError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import read_text
from axlearn_core.plugins.unregistered import CodeNames, with_values
from axlearn_core.run.asset_copies import Place, attach_assets
from axlearn_core.run.record import CONFIG

CHECKPOINTS = "checkpoints"


def read_run_config(
    storage: Storage, uri: str | Path, path: str = CONFIG, *, places: Sequence[Place] | None = None
) -> Node[Any] | None:
    """The resolved config of a run at a path of its storage; None if there is no such file.

    Paths of the run's assets are local paths in it, which can be opened now.

    Args:
        storage: of the file.
        uri: of the storage, for messages.
        path: of the file.
        places: folders with the run's assets; by default that of the file.

    Raises:
        CheckpointError: the file cannot be read back, or the run lacks an asset.
    """
    file = f"{uri}/{path}"
    try:
        text = storage.read(path).decode()
        request = read_text(text, file, CodeNames(registry()))
    except MissingFileError:
        return None
    except ConfigError as error:
        raise CheckpointError(f"{file} does not fit the installed packages:\n{error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not a text file: {error}") from None
    if not isinstance(request.experiment, Node):
        raise CheckpointError(f"{file} is a run file, not the resolved config of a run (it lacks `resolved: true`)")
    try:
        config = with_values(request.experiment)
    except ConfigError as error:
        raise CheckpointError(f"{file} cannot be read by this process:\n{error}") from error
    return attach_assets(config, file, places or [(storage, path.removesuffix(CONFIG))])


def find_checkpoints(uri: str | Path, storage: Storage, elsewhere: str | None) -> Checkpoints:
    """The folder of checkpoints of the run at `uri`; `elsewhere` is `checkpointer.uri` of its config."""
    if elsewhere is not None:
        return Checkpoints(open_storage(elsewhere), elsewhere)
    return Checkpoints(storage, f"{uri}/{CHECKPOINTS}", f"{CHECKPOINTS}/")
