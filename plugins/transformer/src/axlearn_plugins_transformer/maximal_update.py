"""The `mup` feature."""

from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, node, patch, setting
from axlearn_core.config.tree import edit_nodes
from axlearn_core.contracts.experiment import get_model_config, get_optimizer_config, get_parameter_rules
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn.optimizers import Growth, width_scale
from axlearn_core.plugins.feature import Feature, no_match_problem
from axlearn_plugins_transformer.embedding import Embedding
from axlearn_plugins_transformer.layer_roles import ScoreScaleRole, WidthRole
from axlearn_plugins_transformer.width_scaling import (
    SCALED_INITIALIZERS,
    HeadScale,
    WidthInitializer,
    WidthMultiplier,
    WidthRule,
    no_rule,
)

Tree = TypeVar("Tree", bound=Node[Any])


@node
class MaximalUpdate(Feature):
    """Scales initial values, learning rates, logits and attention scores by the width (muP).

    Learning rates that are tuned at the base width should then suit wider models (Yang et al., 2022, arXiv 2203.03466, table 8).
    At the base width, the feature changes nothing. It works for Adam, AdamW, Lion and Muon. If the experiment already has the
    feature, this sets its options.

    Attributes:
        base_width: Width of the base model, whose settings were tuned.
        base_head_dim: Size of an attention head in the base model. The default is the size at the base width with the same number
            of heads. Set it if wider models have more heads instead of larger ones.
        latents: Whether the ranks of latent attention (`mla`) `grow` with the width or are `fixed`.
    """

    stage = "tune"
    # These features add rules, or layers with initializers.
    after = ("attention-sinks", "freeze", "output-gate", "quantization")
    excludes = ("schedule-free",)
    example = "base_width=64"

    base_width: int = setting(default=REQUIRED, ge=1)
    base_head_dim: int | None = setting(default=None, ge=1)
    latents: Literal["grow", "fixed"] = "grow"

    def apply(self, cfg: Tree) -> Tree:
        """Set the initializers, the multipliers and a rule of the learner."""
        return patch(cfg, {"model": self._model(cfg), "learner.rules": self._rules(cfg)})

    def _model(self, cfg: Node[Any]) -> Node[Any]:
        expected = "a model with the role WidthRole, such as causal-lm with a decoder"
        model = get_model_config(cfg)
        if not isinstance(model, Node):
            raise ConfigError(no_match_problem("mup", expected))
        edit_nodes(
            model,
            lambda _, part: part if isinstance(part, WidthRole) else None,
            no_match=no_match_problem("mup", expected),
        )
        model = edit_nodes(model, self._factors, no_match=None)
        return edit_nodes(model, self._initializer, no_match=None, outermost=True)

    def _factors(self, _: str, part: Any) -> Any:
        fields: Any = part
        if isinstance(part, WidthRole):
            return attrs.evolve(fields, output_multiplier=self._multiplier(fields.output_multiplier, -1.0))
        if isinstance(part, ScoreScaleRole):
            return attrs.evolve(fields, scale=self._score_scale(fields.scale))
        if isinstance(part, Embedding.Config) and part.scale:  # the table's values no longer shrink with the width
            return attrs.evolve(part, multiplier=self._multiplier(part.multiplier, -0.5))
        return None

    def _score_scale(self, old: float | Node[float] | None) -> Node[float]:
        new = {"base_width": self.base_width, "base_head_dim": self.base_head_dim}
        return attrs.evolve(old, **new) if isinstance(old, HeadScale) else HeadScale(**new, value=old)

    def _initializer(self, _: str, part: Any) -> Any:
        if isinstance(part, WidthInitializer):
            return attrs.evolve(part, base_width=self.base_width)
        if isinstance(part, SCALED_INITIALIZERS):
            return WidthInitializer(base=part, base_width=self.base_width)
        return None

    def _multiplier(self, old: float | Node[float], exponent: float) -> Node[float]:
        if isinstance(old, WidthMultiplier):
            return attrs.evolve(old, base_width=self.base_width)
        return WidthMultiplier(base_width=self.base_width, value=old, exponent=exponent)

    def _rules(self, cfg: Node[Any]) -> tuple[Any, ...]:
        rules, optimizer = get_parameter_rules(cfg), get_optimizer_config(cfg)
        if rules is None or not isinstance(optimizer, Node):
            raise ConfigError(
                Problem(
                    path="learner.rules",
                    message="mup needs a learner with rules, which scale the learning rates",
                    expected="a learner with an optimizer and rules, such as the core's",
                    fix="leave the feature mup out",
                )
            )
        if width_scale(optimizer, ("embed", "mlp"), Growth(2, 2, 1, 1)) is None:
            raise no_rule(optimizer)
        others = [rule for rule in rules if not isinstance(rule, WidthRule)]
        return (WidthRule(base_width=self.base_width, latents=self.latents), *others)
