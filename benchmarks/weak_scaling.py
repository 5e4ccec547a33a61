"""Compare predicted with published weak scaling, and show the loss that the prediction does not explain.

    uv run python benchmarks/weak_scaling.py [--json]

The published curves are from arXiv 2507.05411 (v5p; Llama2-70B from 256 to 4,096 chips, a dense 150B from 8,192 to
32,768). Only their ends have figures. For each curve, it prints three predictions of the loss of MFU:

- by communication alone: the model of `axlearn_plugins_plan.predict` without its exponent of the number of chips;
- by a model that was fitted without this curve, with the exponent from all other steps;
- by the stored model, which was also fitted to this curve.

The formulas do not model the remaining loss: stragglers, input, restarts, congestion between slices.
Nothing is compiled. The plans in `steps.toml` come from `benchmarks/plan_table.py`.
"""

import argparse
import json

import attrs
from step_times import fit

from axlearn_plugins_plan.predict import Model, Step, load_measurements


def curves(steps: list[Step]) -> dict[str, list[Step]]:
    """Return the steps of each training by name, smallest machine first."""
    by_name: dict[str, list[Step]] = {}
    for s in steps:
        if "weak scaling" in s.source:
            by_name.setdefault(s.name.partition(" on ")[0], []).append(s)
    return {name: sorted(curve, key=lambda s: s.chips) for name, curve in by_name.items()}


def share_left(model: Model, curve: list[Step]) -> float:
    """Return the ratio of the MFU on the largest machine to the MFU on the smallest, by a model."""
    first, last = curve[0], curve[-1]
    seconds = [model.seconds(s.target, s.platform, s.chips, s) for s in (first, last)]
    return seconds[0] / seconds[1] * last.compute / first.compute


def explained(steps: list[Step], model: Model, curve: list[Step]) -> dict:
    """Return the published and the predicted losses as shares of the MFU on the smallest machine."""
    first, last = curve[0], curve[-1]
    others = [s for s in steps if s not in curve]
    targets, platforms = (list(dict.fromkeys(getattr(s, n) for s in steps)) for n in ("target", "platform"))
    left_out = fit(others, targets, platforms)
    published = 1 - first.seconds / last.seconds * last.compute / first.compute
    return {
        "chips": [first.chips, last.chips],
        "published": published,
        "sent": 1 - share_left(attrs.evolve(model, scale=0.0), curve),
        "without_this_curve": 1 - share_left(left_out, curve),
        "scale_without_this_curve": left_out.scale,
        "fitted": 1 - share_left(model, curve),
    }


def lines(name: str, fall: dict) -> list[str]:
    """Return the figures of one curve as text."""

    def line(label: str, lost: float) -> str:
        rest = fall["published"] - lost
        return f"    {label:42} {100 * lost:5.1f}%   of the published fall not explained {100 * rest:+6.1f} points"

    a, b = fall["chips"]
    return [
        f"{name}, {a:,} to {b:,} chips: {100 * fall['published']:.1f}% of the MFU is lost as published",
        line("predicted by what is sent alone", fall["sent"]),
        line(
            f"fitted without this curve (chips ** {fall['scale_without_this_curve']:.3f})", fall["without_this_curve"]
        ),
        line("fitted with it", fall["fitted"]),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps, model = load_measurements()
    falls = {name: explained(list(steps), model, curve) for name, curve in curves(list(steps)).items()}
    print(json.dumps(falls, indent=1) if args.json else "\n".join(x for n, f in falls.items() for x in lines(n, f)))


if __name__ == "__main__":
    main()
