"""The feature `router-replay`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, find, node, patch
from axlearn_core.config.tree import edit_nodes, fill_slots
from axlearn_core.config.wrappers import edit_innermost
from axlearn_core.contracts.experiment import get_input_config, get_model_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_moe.replayed_layer import ReplayedLayer
from axlearn_plugins_rl.replayed_experts import count_replayed
from axlearn_plugins_rl.task_input import TaskInput
from axlearn_plugins_transformer.stack import StackLayer

Tree = TypeVar("Tree", bound=Node[Any])


@node
class RouterReplay(Feature):
    """Uses the experts of the rollouts in the training step (R3; Ma et al., 2025, arXiv 2510.11370).

    The engine records the experts of each token, and the routers of the training step use them instead of their own choice. They
    still compute the weights of the experts, so they are trained. With `use: false`, the training step keeps its own choice, and
    only counts the tokens for which it differs, as the metric `router_mismatch`.

    It needs a model with experts, and a method with rollouts such as `grpo`. If settings of the same request change the number of
    layers or of experts per token, set `input.experts` to both.
    """

    stage = "wrap"
    example = "use=false"
    example_needs = ("grpo", "moe")

    use: bool = True

    def apply(self, cfg: Tree) -> Tree:
        """Wrap the layers of the decoder, and add the experts to the rows of a batch."""
        model, old = get_model_config(cfg), get_input_config(cfg)
        layers, top_k = count_replayed(model)
        if not isinstance(old, TaskInput.Config):
            raise ConfigError(
                Problem(
                    path="input",
                    message="router-replay needs rollouts",
                    expected="a task-input",
                    fix="add a method such as grpo, or remove router-replay",
                )
            )
        cfg = patch(cfg, {"input": attrs.evolve(old, experts=(layers, top_k))})
        if find(model, ReplayedLayer.Config):
            change = lambda _, n: attrs.evolve(n, use=self.use) if isinstance(n, ReplayedLayer.Config) else None  # noqa: E731
            return patch(cfg, {"model": edit_nodes(model, change, no_match=NO_LAYER)})
        wrap = lambda layer: ReplayedLayer.Config(layer=layer, top_k=top_k, use=self.use)  # noqa: E731
        fill = lambda _, layer: edit_innermost(layer, wrap) if isinstance(layer, Node) else None  # noqa: E731
        return patch(cfg, {"model": fill_slots(model, StackLayer, fill, no_match=NO_LAYER)})


NO_LAYER = Problem(
    path="model",
    message="router-replay finds no layer to wrap",
    expected="a decoder with a slot `Node[StackLayer]`",
    fix="remove router-replay",
)
