"""The feature `dynamic-tanh`."""

from typing import Any, TypeVar

from axlearn_core.extend import Feature, Node, find, node, patch, replace_config, setting
from axlearn_plugins_my_norm.layer import DynamicTanh
from axlearn_plugins_transformer.norm import RMSNorm

Tree = TypeVar("Tree", bound=Node[Any])


@node
class UseDynamicTanh(Feature):
    """Puts a dynamic tanh in the place of every RMSNorm. Where there are some already, it sets their `alpha`."""

    stage = "replace"
    alpha: float = setting(default=0.5, gt=0)

    def apply(self, cfg: Tree) -> Tree:
        """Raises `ConfigError` where the config has neither an RMSNorm nor a dynamic tanh."""
        if parts := find(cfg, DynamicTanh):
            return patch(cfg, {f"{path}.alpha": self.alpha for path in parts})
        return replace_config(cfg, RMSNorm, DynamicTanh.Config(alpha=self.alpha), drop=("eps", "offset", "init"))
