"""The `dpo` feature."""

from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, get_options, node, patch, replace_config, setting
from axlearn_core.contracts.experiment import get_input_config, get_objective_config
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_finetune.objectives.dpo import DPO
from axlearn_plugins_finetune.objectives.edit import open_model_config, start_from_base
from axlearn_plugins_finetune.objectives.preference_input import PreferenceInput
from axlearn_plugins_finetune.objectives.preferences import PreferenceFiles
from axlearn_plugins_transformer.text.language_model import LanguageModelInput

Tree = TypeVar("Tree", bound=Node[Any])
HELD_OUT = 0.1


@node
class Dpo(Feature):
    """Direct preference optimization (DPO; Rafailov et al., 2023, arXiv 2305.18290).

    `data` is a JSONL file or a list of them, as paths or globs, with rows `{"prompt": ..., "chosen": ..., "rejected": ...}`.
    Held-out rows are in separate files (`validation`), or are a fraction of `data` (`validation_fraction`, 0.1). `beta` sets how
    strongly the model is pulled toward the reference.

    `base` is a run, or other weights, to start training from. The frozen reference uses the model's initial weights. With LoRA,
    it is the model without its adapters. `reference` names different weights for it. `too_long` sets what happens to a pair that is
    longer than a row: `error` or `drop`.

    The tokenizer, the batch size (which now counts pairs) and the sequence length do not change. If the experiment already has
    this objective, the given options are updated.
    """

    stage = "replace"
    replaces = ("input", "objective")
    example = "data=pairs.jsonl"

    data: str | tuple[str, ...] = REQUIRED
    validation: str | tuple[str, ...] = ()
    validation_fraction: float | None = setting(default=None, ge=0, lt=1)
    beta: float | None = setting(default=None, gt=0)
    label_smoothing: float | None = setting(default=None, ge=0, lt=0.5)
    reference: str | None = None
    base: str | None = None
    too_long: Literal["error", "drop"] | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Set `objective` and `input`, and also `loop` if there is a base."""
        return start_from_base(patch(self._set_input(cfg), {"objective": self._objective(cfg)}), self.base, "dpo")

    def _objective(self, cfg: Any) -> DPO.Config:
        options = get_options(self, "beta", "label_smoothing")
        if self.reference is not None:
            options |= {"reference": open_model_config(self.reference), "reference_weights": self.reference}
        old = get_objective_config(cfg)
        return attrs.evolve(old, **options) if isinstance(old, DPO.Config) else DPO.Config(**options)

    def _set_input(self, cfg: Tree) -> Tree:
        old = get_input_config(cfg)
        fraction = self.validation_fraction
        if fraction is None:
            fraction = 0.0 if self.validation else HELD_OUT
        source = PreferenceFiles.Config(paths=self.data, validation_paths=self.validation, validation_fraction=fraction)
        options: dict[str, Any] = {} if self.too_long is None else {"too_long": self.too_long}
        if isinstance(old, PreferenceInput.Config):
            return patch(cfg, {"input": attrs.evolve(old, source=source, **options)})
        if not isinstance(old, LanguageModelInput.Config):
            raise ConfigError(
                Problem(
                    path="input",
                    message="dpo needs a text input with a tokenizer",
                    expected="a language-model-input",
                    fix="remove dpo, or set input to a preference-input",
                )
            )
        lost = [a.name for a in attrs.fields(type(old)) if a.name not in _kept_fields()]
        new = replace_config(old, type(old).owner, PreferenceInput.Config(source=source, **options), drop=tuple(lost))
        return patch(cfg, {"input": new})


def _kept_fields() -> set[str]:
    return {a.name for a in attrs.fields(PreferenceInput.Config)}
