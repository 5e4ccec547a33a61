"""The `local-tier` feature."""

from typing import Any, TypeVar

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.config import Node, get_fields, node, patch, setting
from axlearn_core.contracts.experiment import get_checkpointer_config
from axlearn_core.errors import RequestError
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_runtime.tiered import LocalTier, TieredCheckpointer

Tree = TypeVar("Tree", bound=Node[Any])


@node
class LocalTierFeature(Feature):
    """Saves the training state on the machines of the job every few steps, in addition to checkpoints.

    A restart resumes from the newest intact state. `directory` is on a local disk of each machine or in `/dev/shm`. `copies` is
    the number of other machines that keep a copy of each part. Requires the core's checkpointer.
    """

    stage = "execute"
    example = "every=3"

    every: int = setting(default=10, ge=1)
    directory: str = "/tmp/axlearn-local"
    keep: int = setting(default=2, ge=1)
    copies: int = setting(default=0, ge=0)

    def apply(self, cfg: Tree) -> Tree:
        """Replace the checkpointer with `tiered`."""
        checkpointer = get_checkpointer_config(cfg)
        if not isinstance(checkpointer, ShardedCheckpointer.Config):
            raise RequestError(
                "local-tier requires the core's checkpointer\n"
                f"    got: checkpointer {type(checkpointer).__qualname__}\n    expected: sharded or tiered\n"
                "    fix: remove the feature, or set checkpointer={type: tiered}"
            )
        local = checkpointer.local if isinstance(checkpointer, TieredCheckpointer.Config) else LocalTier.Config()
        local = patch(
            local, {"every_steps": self.every, "directory": self.directory, "keep": self.keep, "copies": self.copies}
        )
        fields = {name: value for name, value in get_fields(checkpointer).items() if name != "local"}
        return patch(cfg, {"checkpointer": TieredCheckpointer.Config(**fields, local=local)})
