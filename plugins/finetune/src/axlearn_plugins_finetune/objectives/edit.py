"""Config edits that the objective features share."""

from pathlib import Path
from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, patch
from axlearn_core.contracts.experiment import get_loop_config
from axlearn_core.errors import CheckpointError, ConfigError, Problem
from axlearn_core.run import open_weights
from axlearn_plugins_finetune.lora.start import CONTINUES_WITHOUT, StartFromRun

Tree = TypeVar("Tree", bound=Node[Any])


def open_model_config(uri: str) -> Node[Any]:
    """Return the config of the model whose weights are at `uri`. Raise `CheckpointError` if there are no weights."""
    try:
        return open_weights(str(Path(uri).expanduser()) if "://" not in uri else uri).config
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {CONTINUES_WITHOUT}") from error


def start_from_base(cfg: Tree, base: str | None, feature: str) -> Tree:
    """Return the config with a loop that starts from the weights of `base`, or unchanged if `base` is None."""
    if base is None:
        return cfg
    loop = get_loop_config(cfg)
    if not isinstance(loop, Node):
        raise ConfigError(
            Problem(
                path="loop", message=f"{feature}: the experiment has no loop that can load `base`", fix="remove `base`"
            )
        )
    if isinstance(loop, StartFromRun.Config):
        return patch(cfg, {"loop": attrs.evolve(loop, run_dir=base)})
    return patch(cfg, {"loop": StartFromRun.Config(loop=loop, run_dir=base)})
