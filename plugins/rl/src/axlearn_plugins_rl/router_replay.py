"""The feature `router-replay`."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, find, node, patch
from axlearn_core.config.roles import CompetingTokensRole
from axlearn_core.config.tree import edit_nodes, fill_slots
from axlearn_core.config.wrappers import edit_innermost
from axlearn_core.contracts.experiment import get_input_config, get_model_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.replayed_layer import ReplayedLayer
from axlearn_plugins_rl.task_input import TaskInput
from axlearn_plugins_transformer.stack import StackLayer
from axlearn_plugins_transformer.transformer import Decoder

Tree = TypeVar("Tree", bound=Node[Any])
MOST_EXPERTS = 2**15
"""Number of experts that a record can tell apart."""


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
        layers, top_k = _read_sizes(model)
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


def _read_sizes(model: Any) -> tuple[int, int]:
    """Return the number of layers and of experts per token.

    Raises:
        ConfigError: The model has no experts, or its experts cannot be replayed.
    """
    experts: list[Any] = list(find(model, MixtureOfExperts.Config).values())
    decoders: list[Any] = list(find(model, Decoder.Config).values())
    counts = {part.top_k for part in experts}
    if len(decoders) != 1 or len(counts) != 1:
        raise ConfigError(
            Problem(
                path="model",
                message="router-replay needs a decoder whose tokens use the same number of experts in each layer with experts",
                got=f"{len(decoders)} decoders, and experts per token: {sorted(counts) or 'none'}",
                fix="add moe, or remove router-replay",
            )
        )
    if find(model, CompetingTokensRole):
        raise ConfigError(
            Problem(
                path="model",
                message="router-replay needs experts that depend only on the token",
                got=", ".join(sorted(find(model, CompetingTokensRole))),
                fix="use softmax-router or sigmoid-router, and dropless-dispatch",
            )
        )
    if max(part.num_experts for part in experts) > MOST_EXPERTS:
        raise ConfigError(
            Problem(
                path="model",
                message=f"router-replay records at most {MOST_EXPERTS} experts",
                fix="remove router-replay",
            )
        )
    return decoders[0].num_layers, counts.pop()
