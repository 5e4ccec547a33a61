"""Published policy-gradient methods as configs of the objective and the advantage."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from axlearn_core.errors import RequestError, nearest
from axlearn_plugins_rl.advantages import BatchAdvantage, GroupAdvantage, RewardAdvantage
from axlearn_plugins_rl.policy_gradient.clips import CispoClip, PpoClip
from axlearn_plugins_rl.policy_gradient.generalized_advantages import GeneralizedAdvantages
from axlearn_plugins_rl.policy_gradient.kl_penalty import KlPenalty
from axlearn_plugins_rl.policy_gradient.loss_means import FixedLengthMean, SequenceMean
from axlearn_plugins_rl.policy_gradient.policy_loss import PolicyGradient
from axlearn_plugins_rl.policy_gradient.ratios import SequenceRatio

Objective = PolicyGradient.Config


@attrs.frozen
class Preset:
    """A method.

    Attributes:
        objective: Config of an objective that reads the batches of the loop.
        advantage: Config of an `axlearn_plugins_rl.rollout_contracts.Advantage`.
    """

    objective: Any
    advantage: Any


def grpo() -> Preset:
    """Group relative policy optimization (Shao et al., 2024, arXiv 2402.03300)."""
    return Preset(Objective(mean=SequenceMean.Config(), penalty=KlPenalty.Config()), GroupAdvantage.Config())


def dr_grpo() -> Preset:
    """GRPO without its biases toward long wrong answers and easy or hard examples (Liu et al., 2025, arXiv 2503.20783)."""
    return Preset(Objective(mean=FixedLengthMean.Config()), GroupAdvantage.Config(scale="none"))


def dapo() -> Preset:
    """The loss of DAPO: clip-higher and a mean over tokens (Yu et al., 2025, arXiv 2503.14476)."""
    return Preset(Objective(clip=PpoClip.Config(high=0.28)), GroupAdvantage.Config())


def gspo() -> Preset:
    """Group sequence policy optimization (Zheng et al., 2025, arXiv 2507.18071)."""
    return Preset(
        Objective(ratio=SequenceRatio.Config(), clip=PpoClip.Config(low=3e-4, high=4e-4), mean=SequenceMean.Config()),
        GroupAdvantage.Config(),
    )


def rloo() -> Preset:
    """REINFORCE with a leave-one-out baseline, on sequences (Ahmadian et al., 2024, arXiv 2402.14740)."""
    return Preset(
        Objective(
            ratio=SequenceRatio.Config(normalize=False),
            mean=SequenceMean.Config(),
            penalty=KlPenalty.Config(coefficient=0.05, estimator="k1", placement="reward"),
        ),
        GroupAdvantage.Config(scale="none", leave_one_out=True),
    )


def reinforce_pp() -> Preset:
    """REINFORCE++: PPO's clip with rewards that are standardized over the batch (Hu et al., 2025, arXiv 2501.03262)."""
    penalty = KlPenalty.Config(coefficient=0.01, estimator="k1", placement="reward")
    return Preset(Objective(penalty=penalty), BatchAdvantage.Config())


def cispo() -> Preset:
    """Clipped importance-sampling weights (MiniMax, 2025, arXiv 2506.13585)."""
    return Preset(Objective(clip=CispoClip.Config()), GroupAdvantage.Config())


def ppo() -> Preset:
    """Proximal policy optimization with a value head (Schulman et al., 2017, arXiv 1707.06347)."""
    penalty = KlPenalty.Config(coefficient=0.05, estimator="k1", placement="reward")
    return Preset(Objective(penalty=penalty, critic=GeneralizedAdvantages.Config()), RewardAdvantage.Config())


PRESETS: Mapping[str, Callable[[], Preset]] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "rloo": rloo,
    "reinforce-pp": reinforce_pp,
    "cispo": cispo,
    "ppo": ppo,
}


def build_preset(name: str, *, kl: float | None = None) -> Preset:
    """Return a method by name.

    Args:
        name: A name in `PRESETS`.
        kl: Weight of the penalty on the divergence from the reference. 0 removes the penalty and the reference. None uses the
            method's own.

    Raises:
        RequestError: If there is no such method.
    """
    if name not in PRESETS:
        close = nearest(name, PRESETS)
        raise RequestError(
            f"unknown method {name!r}\n    expected: one of {', '.join(PRESETS)}"
            + (f"\n    nearest: {', '.join(close)}" if close else "")
        )
    preset = PRESETS[name]()
    if kl is None:
        return preset
    old = preset.objective.penalty
    penalty = None
    if kl > 0:
        penalty = (
            attrs.evolve(old, coefficient=kl) if isinstance(old, KlPenalty.Config) else KlPenalty.Config(coefficient=kl)
        )
    return attrs.evolve(preset, objective=attrs.evolve(preset.objective, penalty=penalty))
