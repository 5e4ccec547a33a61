"""The feature `on-policy-distill`."""

from typing import Any

import attrs

from axlearn_core.config import Node, find, get_options, node, setting
from axlearn_core.contracts.experiment import get_loop_config, get_objective_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_finetune.objectives.distillation import Distillation
from axlearn_plugins_finetune.objectives.edit import open_model_config
from axlearn_plugins_rl.advantages import RewardAdvantage
from axlearn_plugins_rl.method_features import PolicyGradientFeature
from axlearn_plugins_rl.presets import Preset
from axlearn_plugins_rl.rl_loop import RLLoop

REVERSE = 1.0
"""Default interpolation: KL(model || teacher), which the paper recommends for instructions and for reasoning."""


@node
class OnPolicyDistill(PolicyGradientFeature):
    """Distillation on the model's own answers (GKD; Agarwal et al., 2024, arXiv 2306.13649).

    Each step rolls out answers, and brings the model's distribution at each of their tokens closer to the teacher's. `teacher` is
    a run, a directory in Hugging Face format, or other weights with the same vocabulary. Without it, the teacher is the initial
    model. `interpolation` selects the divergence: 1 (default) for KL(model || teacher), 0 for KL(teacher || model), and values
    between them for the generalized Jensen-Shannon divergence.

    The loss does not use rewards. They are logged, so `reward` can measure progress. The other options are those of
    [`PolicyGradientFeature`](docs/rl.md), except `kl`.
    """

    method = "on-policy-distill"

    teacher: str | None = None
    interpolation: float | None = setting(default=None, ge=0, le=1)

    def preset(self, cfg: Node[Any]) -> Preset:
        """Return distillation without the cross-entropy, or update the objective if the experiment has it."""
        if self.kl is not None:
            raise ConfigError(
                Problem(
                    path="kl",
                    message="on-policy-distill has no penalty, because its loss is a divergence",
                    fix="remove `kl`, or set `interpolation`",
                )
            )
        options: dict[str, Any] = get_options(self, "interpolation")
        if self.teacher is not None:
            options |= {"teacher": open_model_config(self.teacher), "teacher_weights": self.teacher}
        old = get_objective_config(cfg)
        if not isinstance(old, Distillation.Config) or not find(get_loop_config(cfg), RLLoop.Config):
            old = Distillation.Config(alpha=1.0, interpolation=REVERSE)
        return Preset(attrs.evolve(old, **options), RewardAdvantage.Config())
