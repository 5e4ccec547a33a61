"""Compare the preference objectives with TRL: losses and gradients on the same weights and batches.

    uv run python benchmarks/preference_formulas.py --trl PYTHON [--seeds 3] [--keep DIR]

`PYTHON` is the interpreter of an environment with `trl` and `torch`. A small Llama with random weights is exported in Hugging Face
format, with a reference of other weights. Each objective runs once here and once in TRL's trainer. Prints the largest differences
over all seeds: of the losses, relative to max(1, loss), and of the gradients, as the norm of the difference over the norm. Exit
code 1 if a loss differs by more than 1e-5 or a gradient by more than 1e-4.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
from safetensors.numpy import load_file

from axlearn_core.compose import Program, compose
from axlearn_core.compose.objective import PREFIX
from axlearn_core.contracts.experiment import get_input_config
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_models.huggingface.family import find_family
from axlearn_plugins_models.huggingface.import_export import write_model

Arrays = dict[str, np.ndarray]

SIZES = {
    "model.dtype": "float32",
    "model.param_dtype": "float32",
    "model.vocab_size": 97,
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 48,
    "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.attention.num_kv_heads": 2,
    "model.decoder.layer.attention.head_dim": 12,
    "model.decoder.layer.feed_forward.hidden_dim": 96,
    "input.batch_size": 8,
    "input.sequence_length": 24,
}
EXPERIMENT = "llama3-8b"
ROWS, LENGTH = SIZES["input.batch_size"], SIZES["input.sequence_length"]
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4
Measure = Callable[[Path, str, int], Mapping[str, tuple[float, float]]]


@attrs.frozen
class Case:
    """An objective with its settings, here and in TRL.

    Attributes:
        name: Name of the case.
        feature: Feature with its options, as in `--with`.
        trl: Name of the function in `baselines/trl_preferences.py`.
        options: Its options.
        scale: Our loss over TRL's.
        aligned: All prompts are empty, and all chosen answers have the same length.
    """

    name: str
    feature: str
    trl: str
    options: Mapping[str, Any]
    scale: float = 1.0
    aligned: bool = False


CASES = (
    Case("dpo", "dpo:data=x,beta=0.3", "dpo", {"loss_type": "sigmoid", "beta": 0.3}),
    Case("ipo", "ipo:data=x,beta=0.3", "dpo", {"loss_type": "ipo", "beta": 0.3}),
    # TRL adds the prompt to the likelihood and averages over all tokens of the batch, so only an aligned batch is comparable.
    Case("orpo", "orpo:data=x,odds_weight=0.4", "orpo", {"beta": 0.4}, aligned=True),
    Case(
        "simpo",
        "simpo:data=x,beta=1.5,gamma=0.6,label_smoothing=0.1",
        "simpo",
        {"beta": 1.5, "simpo_gamma": 0.6, "label_smoothing": 0.1},
    ),
    Case(
        "kto",
        "kto:data=x,beta=0.3,desirable_weight=0.8,undesirable_weight=1.2",
        "kto",
        {"beta": 0.3, "desirable_weight": 0.8, "undesirable_weight": 1.2},
    ),
    Case("reward-model", "reward-model:data=x,center=0.1", "reward", {"center": 0.1}),
    *(
        Case(
            f"distill, interpolation {beta}",
            f"distill:alpha=1.0,temperature=1.7,interpolation={beta}",
            "gkd",
            {"beta": beta, "temperature": 1.7},
            scale=1.7**2,
        )
        for beta in (0, 0.3, 1)
    ),
)


def make_batch(program: Program, case: Case, rng: np.random.Generator) -> Arrays:
    """Return a batch of random prompts and answers of random lengths. Token 0 is padding."""
    source = get_input_config(program.config)
    shapes = source.batch_shapes() if "data=" in case.feature else {"tokens": ((ROWS, LENGTH), "int32")}
    prefixes = sorted({name.removesuffix("tokens") for name in shapes if name.endswith("tokens")})
    prompts = rng.integers(0, 8, ROWS) * (not case.aligned)
    contents = rng.integers(1, SIZES["model.vocab_size"], (ROWS, LENGTH + 1))
    batch: Arrays = {}
    for prefix in prefixes:
        answers = np.full(ROWS, 11) if case.aligned and prefix == "chosen_" else rng.integers(2, 14, ROWS)
        rows = contents.copy()
        rows[:, 1:] = rng.integers(1, SIZES["model.vocab_size"], (ROWS, LENGTH))
        positions = np.arange(LENGTH + 1)
        is_prompt = positions <= prompts[:, None]
        rows = np.where(is_prompt, contents, rows) * (positions <= (prompts + answers)[:, None])
        weights = (rows[:, 1:] > 0) & ~is_prompt[:, 1:]
        columns = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}
        batch |= {f"{prefix}{n}": x.astype("float32" if n == "weights" else "int32") for n, x in columns.items()}
    if "labels" in shapes:
        batch["labels"] = (rng.random(ROWS) < 0.5).astype(np.float32)
    return batch


def random_params(specs: Mapping[str, Any], rng: np.random.Generator, base: Mapping[str, Any] = {}) -> Arrays:
    """Return random parameters, near those of a base if it is given."""

    def fill(path: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape).astype(np.float32)
        if path in base:
            return base[path] + 0.02 * noise
        return 1 + 0.1 * noise if path.endswith("scale") else 0.2 * noise

    return {path: fill(path, tuple(spec.shape)) for path, spec in specs.items()}


def run_ours(program: Program, params: Arrays, reference: Arrays, batch: Arrays) -> tuple[float, Arrays]:
    """Return the loss of a training step and its gradients by path."""
    state, functions = program.init(0), program.functions["train"].call.__self__  # type: ignore[attr-defined]
    frozen = {p: reference[path] for p, path in frozen_paths(program).items()}
    variables = {**state.variables, **frozen}

    def loss(params: Any) -> Any:
        return functions.training_loss(params, variables, batch, jax.random.key(0))[0]

    with program.tracing("train"):
        value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), jax.device_get(gradients)


def frozen_paths(program: Program) -> dict[str, str]:
    """Return the path in the model of each array of a frozen model, by its path in the state."""
    return {
        p: p.removeprefix(f"{prefix}.")
        for prefix in program.trained.frozen
        for p in program.trained.fixed
        if p.startswith(prefix)
    }


def write_weights(directory: Path, program: Program, arrays: Mapping[str, Any]) -> None:
    """Export weights, or gradients in the layout of weights, in Hugging Face format."""
    family, data = find_family(program.config)
    model = program.functional
    directory.mkdir()
    write_model(directory, family, {**data, "dtype": "float32"}, model, {p: arrays[p] for p in model.abstract})


def compare(folder: Path, case: Case, loss: float, program: Program, gradients: Arrays) -> tuple[float, float]:
    """Return the differences of the loss and of the gradients from TRL's."""
    theirs = load_file(folder / f"{case.name}.trl.safetensors")
    directory = folder / f"{case.name} gradients"
    write_weights(directory, program, gradients)
    ours = load_file(directory / "model.safetensors")
    if PREFIX + "head.weight" in gradients:
        ours["score.weight"] = gradients[PREFIX + "head.weight"].T
        ours.pop("lm_head.weight", None)  # a reward model does not compute logits
    expected = case.scale * float(theirs.pop("loss")[0])
    assert ours.keys() == theirs.keys(), f"{case.name}: {sorted(ours.keys() ^ theirs.keys())}"
    pairs = [(ours[n], case.scale * theirs[n]) for n in theirs]
    difference = sum(float(((a - b) ** 2).sum()) for a, b in pairs) ** 0.5
    norm = sum(float((b**2).sum()) for _, b in pairs) ** 0.5
    return abs(loss - expected) / max(1.0, abs(expected)), difference / norm


def measure(folder: Path, python: str, seed: int) -> dict[str, tuple[float, float]]:
    """Return the differences of all cases for one seed."""
    rng, results = np.random.default_rng(seed), {}
    reference: Arrays = {}
    policy: Arrays = {}
    for case in CASES:
        config: Any = resolve(EXPERIMENT, with_=[case.feature], set=SIZES).config
        program = compose(config, jax.devices()[:1])
        if not policy:
            reference = random_params(program.functional.abstract, rng)
            policy = random_params(program.functional.abstract, rng, reference)
            for name, arrays in (("policy", policy), ("reference", reference)):
                write_weights(folder / name, program, arrays)
        head = {p: x for p, x in program.trained.abstract.items() if p.startswith(PREFIX)}
        params = policy | random_params(head, rng)
        batch = make_batch(program, case, rng)
        extra = {"head": params[PREFIX + "head.weight"]} if head else {}
        np.savez(folder / f"{case.name}.npz", allow_pickle=False, **batch, **extra)
        results[case.name] = (program, *run_ours(program, params, reference, batch))
    (folder / "cases.json").write_text(json.dumps([{**attrs.asdict(c), "options": dict(c.options)} for c in CASES]))
    peer = Path(__file__).parent / "baselines" / "trl_preferences.py"
    subprocess.run([python, str(peer), str(folder)], check=True, stdout=sys.stderr)
    return {c.name: compare(folder, c, results[c.name][1], results[c.name][0], results[c.name][2]) for c in CASES}


def report(measure: Measure, description: str | None, column: str) -> int:
    """Compare all cases for several seeds, and print the largest differences.

    Args:
        measure: Returns the differences of the loss and of the gradients by case, for a folder, TRL's interpreter and a seed.
        description: Description of the command.
        column: Title of the column of cases.

    Returns:
        1 if a difference is above its limit, else 0.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", metavar="PYTHON", required=True, help="Interpreter with TRL.")
    parser.add_argument("--seeds", type=int, default=3, help="Number of random models and batches (default: 3).")
    args = parser.parse_args()
    worst: dict[str, tuple[float, float]] = {}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory(prefix="formulas-") as name:
            for case, (loss, gradient) in measure(Path(name), args.trl, seed).items():
                before = worst.get(case, (0.0, 0.0))
                worst[case] = max(loss, before[0]), max(gradient, before[1])
    print(f"| {column} | loss | gradients |\n|---|---|---|")
    for case, (loss, gradient) in worst.items():
        print(f"| {case} | {loss:.1e} | {gradient:.1e} |")
    return int(any(loss > LOSS_LIMIT or gradient > GRADIENT_LIMIT for loss, gradient in worst.values()))


if __name__ == "__main__":
    sys.exit(report(measure, __doc__, "objective"))
