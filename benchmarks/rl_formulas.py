"""Compare the policy-gradient objective with TRL: losses and gradients on the same weights and batches.

    uv run python benchmarks/rl_formulas.py --trl PYTHON [--seeds 3]

`PYTHON` is the interpreter of an environment with `trl` and `torch`. A small Llama with random weights is exported in Hugging Face
format, with a reference of other weights. Each method runs once here and once in TRL's trainer. Prints, for each method, the
largest differences over all seeds: of the losses, relative to max(1, loss), and of the gradients, as the norm of the difference
over the norm. Exit code 1 if a loss differs by more than 1e-5 or a gradient by more than 1e-4.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
from preference_formulas import (
    EXPERIMENT,
    LENGTH,
    ROWS,
    SIZES,
    compare,
    random_params,
    report,
    run_ours,
    write_weights,
)

from axlearn_core.compose import Program, compose
from axlearn_core.config import patch
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_rl.policy_gradient.clips import CispoClip, PpoClip
from axlearn_plugins_rl.policy_gradient.importance_correction import ImportanceCorrection
from axlearn_plugins_rl.policy_gradient.kl_penalty import KlPenalty
from axlearn_plugins_rl.policy_gradient.loss_means import FixedLengthMean, SequenceMean
from axlearn_plugins_rl.policy_gradient.policy_loss import PolicyGradient
from axlearn_plugins_rl.policy_gradient.ratios import SequenceRatio, TokenRatio
from axlearn_plugins_rl.presets import build_preset

Arrays = dict[str, np.ndarray]
Config = PolicyGradient.Config
TEMPERATURE = 0.8


@attrs.frozen
class Case:
    """A method with its settings, here and in TRL.

    Attributes:
        name: Name of the case.
        objective: Config of our objective.
        trl: Name of the function in `baselines/trl_policy_gradients.py`.
        options: Its options.
        aligned: All prompts have the same length, and answers have no gaps.
        scale: Our loss over TRL's.
    """

    name: str
    objective: Config
    trl: str
    options: Mapping[str, Any]
    aligned: bool = False
    scale: float = 1.0


def trl_options(loss_type: str, **options: Any) -> dict[str, Any]:
    """Return options of TRL's `GRPOTrainer`."""
    return {"loss_type": loss_type, **options}


CASES = (
    Case("grpo", build_preset("grpo").objective, "grpo", trl_options("grpo", beta=0.04)),
    Case("bnpo", Config(), "grpo", trl_options("bnpo")),
    Case(
        "dr-grpo",
        attrs.evolve(build_preset("dr-grpo").objective, mean=FixedLengthMean.Config(length=9)),
        "grpo",
        trl_options("dr_grpo", max_completion_length=9),
    ),
    Case("dapo", build_preset("dapo").objective, "grpo", trl_options("dapo", epsilon_high=0.28)),
    Case(
        "dapo with an entropy bonus",
        attrs.evolve(build_preset("dapo").objective, entropy_bonus=0.1),
        "grpo",
        trl_options("dapo", epsilon_high=0.28, _entropy_bonus_enabled=True, entropy_coef=0.1),
    ),
    Case(
        "gspo",
        attrs.evolve(build_preset("gspo").objective, clip=PpoClip.Config(low=0.03, high=0.04)),
        "grpo",
        trl_options("grpo", importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.04),
    ),
    Case(
        "cispo",
        attrs.evolve(build_preset("cispo").objective, clip=CispoClip.Config(cap=1.1)),
        "grpo",
        trl_options("cispo", epsilon_high=1.1),
    ),
    Case(
        "dual clip",
        Config(clip=PpoClip.Config(dual=1.3), mean=SequenceMean.Config()),
        "grpo",
        trl_options("grpo", delta=1.3),
    ),
    Case(
        "grpo with an unbiased divergence",
        Config(penalty=KlPenalty.Config(coefficient=0.2, importance=True), mean=SequenceMean.Config()),
        "grpo",
        trl_options("grpo", beta=0.2, use_bias_correction_kl=True),
    ),
    Case(
        "on-policy",
        Config(ratio=TokenRatio.Config(base="current")),
        "grpo",
        trl_options("bnpo", correction=[1.0, 1.0]),
    ),
    Case(
        "truncated correction",
        Config(ratio=TokenRatio.Config(base="current"), correction=ImportanceCorrection.Config(low=0.9, high=1.1)),
        "grpo",
        trl_options("bnpo", correction=[0.9, 1.1]),
    ),
    Case(
        "rloo",
        Config(ratio=SequenceRatio.Config(normalize=False), mean=SequenceMean.Config()),
        "rloo",
        {"epsilon_low": 0.2, "epsilon_high": 0.2},
        aligned=True,
    ),
)


def make_batch(program: Program, params: Arrays, case: Case, rng: np.random.Generator) -> Arrays:
    """Return random trajectories, with log-probabilities of rollouts near those of the model."""
    ids = rng.integers(1, SIZES["model.vocab_size"], (ROWS, LENGTH + 1)).astype(np.int32)
    prompts = np.full(ROWS, 4) if case.aligned else rng.integers(1, 8, ROWS)
    ends = prompts + rng.integers(5, 14, ROWS)
    positions = np.arange(LENGTH)
    weights = (positions >= prompts[:, None]) & (positions < ends[:, None])
    if not case.aligned:
        weights &= positions != prompts[:, None] + 2  # a token of the environment
    segment_ids = (positions < ends[:, None]).astype(np.int32)
    logits = (
        np.asarray(jax.jit(lambda p, t: program.functional.bind(p)(t))(params, ids[:, :-1]), np.float64) / TEMPERATURE
    )
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs = np.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    advantages = rng.standard_normal(ROWS).astype(np.float32)
    return {
        "tokens": ids[:, :-1] * segment_ids,
        "targets": ids[:, 1:] * segment_ids,
        "weights": weights.astype(np.float32),
        "segment_ids": segment_ids,
        "positions": np.broadcast_to(positions, ids[:, 1:].shape).astype(np.int32),
        "advantages": (advantages[:, None] * weights).astype(np.float32),
        "row_advantages": advantages,
        "rollout_logprobs": ((logprobs + 0.2 * rng.standard_normal(logprobs.shape)) * weights).astype(np.float32),
        "rewards": np.zeros(weights.shape, np.float32),
        "temperature": np.full(ROWS, TEMPERATURE, np.float32),
    }


def measure(folder: Path, python: str, seed: int) -> dict[str, tuple[float, float]]:
    """Return the differences of all cases for one seed."""
    rng, results = np.random.default_rng(seed), {}
    reference: Arrays = {}
    policy: Arrays = {}
    for case in CASES:
        config = patch(resolve(EXPERIMENT, set=SIZES).config, {"objective": case.objective})
        program = compose(config, jax.devices()[:1])
        if not policy:
            reference = random_params(program.functional.abstract, rng)
            policy = random_params(program.functional.abstract, rng, reference)
            for name, arrays in (("policy", policy), ("reference", reference)):
                write_weights(folder / name, program, arrays)
        batch = make_batch(program, policy, case, rng)
        np.savez(folder / f"{case.name}.npz", allow_pickle=False, **batch)
        batch.pop("row_advantages")
        results[case.name] = (program, *run_ours(program, policy, reference, batch))
    facts = [{"name": c.name, "trl": c.trl, "options": dict(c.options)} for c in CASES]
    (folder / "cases.json").write_text(json.dumps(facts))
    peer = Path(__file__).parent / "baselines" / "trl_policy_gradients.py"
    subprocess.run([python, str(peer), str(folder)], check=True, stdout=sys.stderr)
    return {c.name: compare(folder, c, results[c.name][1], results[c.name][0], results[c.name][2]) for c in CASES}


if __name__ == "__main__":
    sys.exit(report(measure, __doc__, "method"))
