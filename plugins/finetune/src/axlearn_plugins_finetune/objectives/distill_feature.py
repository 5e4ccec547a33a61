"""The `distill` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, get_options, node, patch, setting
from axlearn_core.config.tree import children
from axlearn_core.contracts.experiment import get_model_config, get_objective_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_finetune.objectives.distillation import Distillation
from axlearn_plugins_finetune.objectives.edit import open_model_config, start_from_base
from axlearn_plugins_transformer.layer_roles import LanguageModelRole

Tree = TypeVar("Tree", bound=Node[Any])


@node
class Distill(Feature):
    """Distillation from a teacher (Hinton et al., 2015, arXiv 1503.02531).

    `teacher` is a run, a directory in Hugging Face format, or other weights. Without it, the teacher is the initial model, which
    keeps a fine-tuned model close to its starting point. The loss is `alpha` (0.5) times the divergence from the teacher at
    `temperature`, plus 1 - `alpha` times the cross-entropy of the text. The divergence is KL(teacher || model) by default;
    `interpolation` 1 selects KL(model || teacher), and values between 0 and 1 a Jensen-Shannon divergence.

    `base` is a run, or other weights, to start training from.

    If the experiment already has this objective, the given options are updated.
    """

    stage = "replace"
    replaces = ("objective",)
    example = "temperature=2.0"

    teacher: str | None = None
    temperature: float | None = setting(default=None, gt=0)
    alpha: float | None = setting(default=None, gt=0, le=1)
    interpolation: float | None = setting(default=None, ge=0, le=1)
    base: str | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Set `objective`, and also `loop` if there is a base."""
        if "objective" not in children(cfg) or not isinstance(get_model_config(cfg), LanguageModelRole):
            raise ConfigError(
                Problem(
                    path="model",
                    message="distill needs a language model",
                    expected="a causal-lm, or another model with the role LanguageModelRole",
                    fix="remove distill",
                )
            )
        options = get_options(self, "temperature", "alpha", "interpolation")
        if self.teacher is not None:
            options |= {"teacher": open_model_config(self.teacher), "teacher_weights": self.teacher}
        old = get_objective_config(cfg)
        new = attrs.evolve(old, **options) if isinstance(old, Distillation.Config) else Distillation.Config(**options)
        return start_from_base(patch(cfg, {"objective": new}), self.base, "distill")
