"""Compare predicted step times with published ones, with each step excluded from its fit.

    uv run python benchmarks/step_times.py [--write]

Reads the steps of `steps.toml` and fits the model of `axlearn_plugins_plan.predict`. For each step it prints the
prediction of a fit without it, and under `trainings` the prediction of a fit without any step of the same training on
the same machine, from any source. A target whose only training is excluded gets the mean efficiency of the others. Then
it prints how much of the weak-scaling loss the prediction explains. `--write` writes the fit to `steps.toml`. Nothing
is compiled. The plans of the steps come from `benchmarks/plan_table.py`.
"""

import argparse
import re
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from axlearn_plugins_plan.predict import Model, Step, load_measurements, log_ratio

FILE = Path(__file__).parents[1] / "plugins/plan/src/axlearn_plugins_plan/steps.toml"
PRIOR = 0.15
"""Standard deviation of the targets' log efficiencies. It regularizes targets with few steps."""
LEAST = 0.1
"""Minimum share of the communication that a step waits for. If it were free, a search would use it without limit."""


def unpack(values: np.ndarray, targets: list[str], platforms: list[str], spread: float = 1.0) -> Model:
    efficiency = {t: float(np.exp(v)) for t, v in zip(targets, values, strict=False)}
    rest = values[len(targets) :]
    exposed = dict(zip(platforms, (float(v) for v in rest[2:]), strict=True))
    return Model(
        efficiency=efficiency, grouped=float(np.exp(rest[0])), exposed=exposed, scale=float(rest[1]), spread=spread
    )


def fit(steps: list[Step], targets: list[str], platforms: list[str]) -> Model:
    def residuals(values: np.ndarray) -> np.ndarray:
        model = unpack(values, targets, platforms)
        misses = [log_ratio(model, s) / 0.05 for s in steps]
        logs = values[: len(targets)]
        prior = (logs - logs.mean()) / PRIOR
        exposed = (values[len(targets) + 2 :] - 0.5) / 0.5  # a share between 0 and 1
        return np.concatenate([misses, prior, exposed, [values[len(targets)] / 2.0]])

    start = np.concatenate([np.full(len(targets), np.log(0.7)), [-0.8, 0.05], np.full(len(platforms), 0.5)])
    low = np.concatenate([np.full(len(targets), -3.0), [-3.0, 0.0], np.full(len(platforms), LEAST)])
    high = np.concatenate([np.full(len(targets), 0.0), [0.0, 0.5], np.ones(len(platforms))])
    return unpack(least_squares(residuals, start, bounds=(low, high)).x, targets, platforms)


def left_out(steps: list[Step], together: bool) -> list[float]:
    """Return the log ratio of prediction over measured time for each step.

    Each fit excludes the step, or its whole training.
    """
    targets = list(dict.fromkeys(s.target for s in steps))
    platforms = list(dict.fromkeys(s.platform for s in steps))
    results = []
    for step in steps:
        rest = [s for s in steps if (s.name != step.name if together else s is not step)]
        results.append(log_ratio(fit(rest, targets, platforms), step))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the fit to steps.toml")
    args = parser.parse_args()
    steps = list(load_measurements()[0])
    targets = list(dict.fromkeys(s.target for s in steps))
    platforms = list(dict.fromkeys(s.platform for s in steps))
    one, trainings = left_out(steps, False), left_out(steps, True)
    print(f"{'step':42} {'system':12} {'published':>9} {'left out':>9} {'error':>7} {'training left out':>18}")
    for s, a, b in zip(steps, one, trainings, strict=True):
        errors = f"{100 * np.expm1(a):+6.1f}% {100 * np.expm1(b):+17.1f}%"
        print(f"{s.name:42} {s.system:12} {s.seconds:8.2f}s {s.seconds * np.exp(a):8.2f}s {errors}")
    medians = [100 * float(np.median(np.abs(np.expm1(log_ratios)))) for log_ratios in (one, trainings)]
    print(
        f"median error: {medians[0]:.1f}% of n={len(steps)} steps, each left out; {medians[1]:.1f}% with its training left out"
    )
    whole = fit(steps, targets, platforms)
    spread = float(np.exp(np.quantile(np.abs(trainings), 0.8)))
    print(f"interval: four of five steps within a factor of {spread:.3f}")
    falls(steps, whole)
    text = model_text(whole, spread)
    print(text)
    if args.write:
        FILE.write_text(re.sub(r"(?s)\[model\].*?(?=\n\[\[step\]\])", text, FILE.read_text()))


def falls(steps: list[Step], model: Model):
    """Return the published and the predicted weak-scaling loss from the smallest machine to the largest."""
    curves: dict[str, list[Step]] = {}
    for s in steps:
        if "weak" in s.source:
            curves.setdefault(s.name.partition(" on ")[0], []).append(s)
    for name, (*_,) in curves.items():
        first, last = curves[name][0], curves[name][-1]
        fell = last.seconds / first.seconds * first.compute / last.compute
        seconds_ratio = model.seconds(last.target, last.platform, last.chips, last) / model.seconds(
            first.target, first.platform, first.chips, first
        )
        bytes_ratio = (last.compute + last.links + last.network) / (first.compute + first.links + first.network)
        print(
            f"{name}, {first.chips} to {last.chips} chips: a step takes {100 * (fell - 1):.1f}% longer as published, "
            f"{100 * (seconds_ratio - 1):.1f}% as predicted; "
            f"what is sent explains {100 * (bytes_ratio - 1):.1f}%, the number of chips the rest"
        )


def model_text(model: Model, spread: float) -> str:
    def table(values) -> str:
        return "{ " + ", ".join(f'"{k}" = {v:.4g}' for k, v in values.items()) + " }"

    return (
        f"[model]\nefficiency = {table(model.efficiency)}\ngrouped = {model.grouped:.4g}\n"
        f"exposed = {table(model.exposed)}\nscale = {model.scale:.4g}\nspread = {spread:.4g}\n"
    )


if __name__ == "__main__":
    main()
