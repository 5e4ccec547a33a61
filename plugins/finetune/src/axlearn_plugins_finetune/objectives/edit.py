"""What the features of this package share."""

from pathlib import Path
from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, patch
from axlearn_core.contracts.experiment import loop_of
from axlearn_core.errors import CheckpointError, ConfigError, Problem
from axlearn_core.run import open_weights
from axlearn_plugins_finetune.lora.start import CONTINUES_WITHOUT, StartFromRun

Tree = TypeVar("Tree", bound=Node[Any])


def model_at(uri: str) -> Node[Any]:
    """The config of the model whose weights lie there; raises `CheckpointError` where there are none."""
    try:
        return open_weights(str(Path(uri).expanduser()) if "://" not in uri else uri).config
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {CONTINUES_WITHOUT}") from error


def start_from(cfg: Tree, base: str | None, feature: str) -> Tree:
    """The config with a loop that begins with the weights of `base`; unchanged where that is None."""
    if base is None:
        return cfg
    loop = loop_of(cfg)
    if not isinstance(loop, Node):
        raise ConfigError(
            Problem(path="loop", message=f"{feature} finds no loop that could load `base`", fix="leave out `base`")
        )
    if isinstance(loop, StartFromRun.Config):
        return patch(cfg, {"loop": attrs.evolve(loop, run_dir=base)})
    return patch(cfg, {"loop": StartFromRun.Config(loop=loop, run_dir=base)})
