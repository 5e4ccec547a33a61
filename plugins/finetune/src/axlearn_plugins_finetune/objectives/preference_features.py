"""The features that train on preferences: `dpo`, `ipo`, `orpo`, `simpo`, `kto` and `reward-model`."""

from typing import Any, ClassVar, Literal, TypeVar

import attrs

from axlearn_core.config import REQUIRED, Node, find, get_options, node, patch, replace_config, setting
from axlearn_core.contracts.experiment import get_input_config, get_objective_config, get_parameter_rules
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.learn.learner import ParameterRule
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_finetune.objectives.bradley_terry import BradleyTerry
from axlearn_plugins_finetune.objectives.dpo import DPO
from axlearn_plugins_finetune.objectives.edit import open_model_config, start_from_base
from axlearn_plugins_finetune.objectives.ipo import IPO
from axlearn_plugins_finetune.objectives.kto import KTO
from axlearn_plugins_finetune.objectives.labelled_input import LabelledInput
from axlearn_plugins_finetune.objectives.orpo import ORPO
from axlearn_plugins_finetune.objectives.preference_input import AnswerInput, PreferenceInput
from axlearn_plugins_finetune.objectives.preference_objective import PreferenceObjective
from axlearn_plugins_finetune.objectives.simpo import SimPO
from axlearn_plugins_transformer.text.language_model import LanguageModelInput

Tree = TypeVar("Tree", bound=Node[Any])
HELD_OUT = 0.1
HEAD, FROZEN_HEAD = "model.decoder.head", ParameterRule(pattern="decoder.head.**", freeze=True)


@node
class PreferenceFeature(Feature):
    """Base of features that set an input of preferences and an objective. A subclass sets the class attributes and adds options."""

    stage = "replace"
    replaces = ("input", "objective")
    example = "data=pairs.jsonl"

    objective_type: ClassVar[type[PreferenceObjective]]
    """The objective."""
    input_type: ClassVar[type[AnswerInput]] = PreferenceInput
    """The input that the objective reads."""
    name: ClassVar[str]
    """Name of the feature, for errors."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Options that are settings of the objective."""

    data: str | tuple[str, ...] = REQUIRED
    validation: str | tuple[str, ...] = ()
    validation_fraction: float | None = setting(default=None, ge=0, lt=1)
    base: str | None = None
    too_long: Literal["error", "drop"] | None = None

    def apply(self, cfg: Tree) -> Tree:
        """Set `objective` and `input`, and also `loop` if there is a base."""
        old, kind = get_objective_config(cfg), self.objective_type.Config
        options = self.objective_options()
        objective = attrs.evolve(old, **options) if isinstance(old, kind) else kind(**options)
        return start_from_base(patch(self._set_input(cfg), {"objective": objective}), self.base, self.name)

    def objective_options(self) -> dict[str, Any]:
        """Return the settings of the objective that the user has set."""
        return get_options(self, *self.settings)

    def _set_input(self, cfg: Tree) -> Tree:
        old, kind = get_input_config(cfg), self.input_type
        fraction = self.validation_fraction
        if fraction is None:
            fraction = 0.0 if self.validation else HELD_OUT
        source = kind.source_type.Config(
            paths=self.data, validation_paths=self.validation, validation_fraction=fraction
        )
        options: dict[str, Any] = {} if self.too_long is None else {"too_long": self.too_long}
        if isinstance(old, kind.Config):
            return patch(cfg, {"input": attrs.evolve(old, source=source, **options)})
        if not isinstance(old, (LanguageModelInput.Config, AnswerInput.Config)):
            raise ConfigError(
                Problem(
                    path="input",
                    message=f"{self.name} needs a text input with a tokenizer",
                    expected="a language-model-input",
                    fix=f"remove {self.name}, or set input to a {kind.unit} input",
                )
            )
        fields = {a.name for a in attrs.fields(kind.Config)}
        lost = [a.name for a in attrs.fields(type(old)) if a.name not in fields]
        new = replace_config(old, type(old).owner, kind.Config(source=source, **options), drop=tuple(lost))
        return patch(cfg, {"input": new})


@node
class ReferenceFeature(PreferenceFeature):
    """Base of features whose objective has a reference."""

    beta: float | None = setting(default=None, gt=0)
    reference: str | None = None

    def objective_options(self) -> dict[str, Any]:
        """Add the reference to the settings."""
        options = super().objective_options()
        if self.reference is not None:
            options |= {"reference": open_model_config(self.reference), "reference_weights": self.reference}
        return options


@node
class Dpo(ReferenceFeature):
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

    objective_type, name, settings = DPO, "dpo", ("beta", "label_smoothing")

    label_smoothing: float | None = setting(default=None, ge=0, lt=0.5)


@node
class Ipo(ReferenceFeature):
    """Identity preference optimization (IPO; Azar et al., 2023, arXiv 2310.12036).

    Unlike `dpo`, it gives the margin between the answers a target, so the model stays near the reference if all labels agree.
    `per_token` (true) divides the log-ratio of an answer by its number of tokens. See `dpo` for the other options.
    """

    objective_type, name, settings = IPO, "ipo", ("beta", "per_token")

    per_token: bool | None = None


@node
class Orpo(PreferenceFeature):
    """Odds ratio preference optimization (ORPO; Hong et al., 2024, arXiv 2403.07691).

    Trains on the chosen answers and, with the weight `odds_weight` (0.1), on the odds ratio of the two answers. It needs no
    reference, and can replace supervised fine-tuning. See `dpo` for the data and the other options.
    """

    objective_type, name, settings = ORPO, "orpo", ("odds_weight",)

    odds_weight: float | None = setting(default=None, gt=0)


@node
class Simpo(PreferenceFeature):
    """Simple preference optimization (SimPO; Meng et al., 2024, arXiv 2405.14734).

    The reward of an answer is `beta` (2.0) times the mean log-probability of its tokens. The reward of the chosen answer should
    exceed that of the rejected answer by `gamma` (1.0). It needs no reference. See `dpo` for the data and the other options.
    """

    objective_type, name, settings = SimPO, "simpo", ("beta", "gamma", "label_smoothing")

    beta: float | None = setting(default=None, gt=0)
    gamma: float | None = setting(default=None, ge=0)
    label_smoothing: float | None = setting(default=None, ge=0, lt=0.5)


@node
class Kto(ReferenceFeature):
    """Kahneman-Tversky optimization (KTO; Ethayarajh et al., 2024, arXiv 2402.01306).

    Trains on single answers: the rows of `data` are `{"prompt": ..., "completion": ..., "label": true}`, with `false` for an
    undesirable answer. `desirable_weight` and `undesirable_weight` (1.0) balance the two kinds. The batch size counts rows. See
    `dpo` for the other options.
    """

    objective_type, input_type, name = KTO, LabelledInput, "kto"
    settings = ("beta", "desirable_weight", "undesirable_weight")
    example = "data=labelled.jsonl"

    desirable_weight: float | None = setting(default=None, gt=0)
    undesirable_weight: float | None = setting(default=None, gt=0)


@node
class RewardModel(PreferenceFeature):
    """Train a reward model on pairs of answers (Ouyang et al., 2022, arXiv 2203.02155).

    The reward is a linear map of the hidden state of the last token. The model's output layer is not used. If it has weights of
    its own, they are frozen. `center` is the weight of a penalty that keeps the rewards near 0. The run is a reward that can score
    other text; see `axlearn_plugins_finetune.objectives.reward_scorer`. See `dpo` for the data and the other options.
    """

    objective_type, name, settings = BradleyTerry, "reward-model", ("center",)

    center: float | None = setting(default=None, ge=0)

    def apply(self, cfg: Tree) -> Tree:
        """Add a rule to `learner.rules` if the output layer is not tied to the embedding."""
        cfg = super().apply(cfg)
        rules = get_parameter_rules(cfg)
        if rules is None or FROZEN_HEAD in rules or not find(cfg, HEAD).get(HEAD):
            return cfg
        return patch(cfg, {"learner.rules": (*rules, FROZEN_HEAD)})
