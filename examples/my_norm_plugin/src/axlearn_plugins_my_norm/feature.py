"""The `dynamic-tanh` feature."""

from typing import Any, TypeVar

from axlearn_core.extend import Feature, Node, find, node, patch, replace_config, setting
from axlearn_plugins_my_norm.layer import DynamicTanh
from axlearn_plugins_transformer.norm import RMSNorm

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseDynamicTanh(Feature):
    """Replaces every RMSNorm with a dynamic tanh. Sets `alpha` on existing ones."""

    stage = "replace"
    alpha: float = setting(default=0.5, gt=0)

    def apply(self, cfg: Tree) -> Tree:
        """Return the changed config. Raise `ConfigError` if it has neither layer."""
        if nodes := find(cfg, DynamicTanh):
            return patch(cfg, {f"{path}.alpha": self.alpha for path in nodes})
        return replace_config(cfg, RMSNorm, DynamicTanh.Config(alpha=self.alpha), drop=("eps", "offset", "init"))
