"""The `multi-token-prediction` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, get_options, node, patch, replace_config, setting
from axlearn_core.config.tree import children
from axlearn_core.contracts.experiment import get_model_config
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.feature import Feature, no_match_problem
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.multi_token import NEEDED, MultiTokenCausalLM

Tree = TypeVar("Tree", bound=Node[Any])


@node
class MultiTokenPrediction(Feature):
    """Trains heads that predict the tokens after the next one (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Each of `depth` heads has a layer of the model's own kind, and shares the embedding and the output layer. The average of their
    losses is added to the training loss with the weight `loss_weight`. Generation and evaluation do not use the heads, except that
    evaluation reports their losses. `axlearn serve` can draft tokens with them. If the model already has heads, the feature sets
    the given options.

    Attributes:
        depth: Number of heads (default: 1).
        loss_weight: Weight of the average loss of the heads (default: 0.3).
    """

    stage = "replace"
    excludes = ("distill", "dpo", "ipo", "kto", "orpo", "reward-model", "simpo")  # their losses do not train the heads
    bridge = "axlearn_plugins_finetune.conversion.depth_bridge:bridge"

    depth: int | None = setting(default=None, ge=1, le=16)
    loss_weight: float | None = setting(default=None, gt=0)

    def apply(self, cfg: Tree) -> Tree:
        """Replace the model with one that has heads, or set the options of its heads."""
        model = get_model_config(cfg)
        if not isinstance(model, CausalLM.Config) or any(name not in children(model.decoder) for name in NEEDED):
            expected = f"a causal-lm whose decoder has {', '.join(NEEDED)}"
            raise ConfigError(no_match_problem("multi-token-prediction", expected))
        options = get_options(self, "depth")
        if self.loss_weight is not None:
            options["mtp_weight"] = self.loss_weight
        if isinstance(model, MultiTokenCausalLM.Config):
            return patch(cfg, {"model": attrs.evolve(model, **options)})
        return patch(cfg, {"model": replace_config(model, CausalLM, MultiTokenCausalLM.Config(**options))})
