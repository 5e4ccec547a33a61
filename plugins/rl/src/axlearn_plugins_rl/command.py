"""`axlearn rl`: sample and score rollouts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from axlearn_core.cli.common import json_option, print_json, print_table
from axlearn_core.cli.main import Group
from axlearn_core.cli.terminal import echo

_OUT = click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSONL file to write the scored rollouts to. It must not exist.",
)
_REWARD = click.option(
    "--reward",
    metavar="NAME[:key=value,...]|FILE.yaml",
    help="Reward (default: the run's, the task's own score, or `exact`).",
)
_SOLVED = click.option(
    "--solved", type=float, default=1.0, show_default=True, help="Smallest reward that solves an example."
)


@click.group(cls=Group)
def rl() -> None:
    """Sample and score rollouts of tasks for reinforcement learning."""


@click.command()
@click.argument("run", metavar="RUN_DIR|HF_DIR|URI")
@click.option(
    "--task", metavar="NAME[:key=value,...]|FILE.yaml", help="Task (default: the one that the run was trained on)."
)
@_REWARD
@click.option(
    "-n", "--samples", type=click.IntRange(1, 2**16), default=8, show_default=True, help="Rollouts per example."
)
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Maximum number of examples.")
@click.option(
    "--split", type=click.Choice(["held-out", "train"]), default="held-out", show_default=True, help="Examples to use."
)
@click.option(
    "--set", "set_", multiple=True, metavar="PATH=VALUE", help="Set a value of the policy, such as temperature=0.7."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the rollouts.")
@click.option("--step", type=click.IntRange(min=1), help="Step of the checkpoint (default: the newest).")
@_SOLVED
@_OUT
@json_option
def sample(
    run: str, task: str | None, reward: str | None, samples: int, limit: int, split: str, set_: tuple[str, ...], seed: int,
    step: int | None, solved: float, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Let a model answer the examples of a task, and score the answers.

    Prints the mean reward and pass@k, the probability that one of k answers solves an example, with their standard errors. The
    sampling parameters are those of the run's rollouts, and can be changed with --set.
    """
    import attrs

    from axlearn_plugins_rl.component_argument import read_component, set_values
    from axlearn_plugins_rl.sample_run import read_parts, sample_groups

    _check_new(out)
    parts = read_parts(run, step)
    if task is not None:
        parts = attrs.evolve(parts, task=read_component(task, "--task"))
    if reward is not None:
        parts = attrs.evolve(parts, reward=read_component(reward, "--reward"))
    parts = attrs.evolve(parts, policy=set_values(parts.policy, set_))
    groups = sample_groups(
        run,
        parts,
        samples=samples,
        split="train" if split == "train" else "held_out",
        limit=limit,
        seed=seed,
        step=step,
    )
    _report(groups, solved, out, as_json, attempts=_powers_of_two(samples))


@click.command()
@click.argument("task", metavar="TASK[:key=value,...]|FILE.yaml")
@click.argument("rollouts", metavar="ROLLOUTS.jsonl")
@_REWARD
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the task.")
@_SOLVED
@_OUT
@json_option
def score(
    task: str, rollouts: str, reward: str | None, seed: int, solved: float, out: Path | None, as_json: bool
) -> None:
    """Score existing rollouts again.

    ROLLOUTS is a file of `axlearn rl sample`, of a training run, or of another program. Each line needs the `id` of an example of
    the task and the `text` of an answer. In a run, rollouts/step-N.jsonl stands for the files of all processes.
    """
    from axlearn_plugins_rl.component_argument import read_component
    from axlearn_plugins_rl.rollout_records import read_rollouts
    from axlearn_plugins_rl.score_run import build_scored_task, score_groups

    _check_new(out)
    scored = build_scored_task(
        read_component(task, "TASK"), None if reward is None else read_component(reward, "--reward"), seed
    )
    groups = score_groups(read_rollouts(rollouts), scored)
    _report(groups, solved, out, as_json, attempts=_powers_of_two(max(len(group.rollouts) for group in groups)))


def _check_new(out: Path | None) -> None:
    if out is not None and out.exists():
        raise click.UsageError(f"{out} exists already\n    fix: choose another --out, or remove the file")


def _powers_of_two(count: int) -> Sequence[int]:
    return [2**i for i in range(count.bit_length())]


def _report(groups: Sequence[Any], solved: float, out: Path | None, as_json: bool, *, attempts: Sequence[int]) -> None:
    from axlearn_plugins_rl.rollout_records import write_rollouts
    from axlearn_plugins_rl.score_run import summarize_scores

    if out is not None:
        write_rollouts(out, groups)
    summary = summarize_scores(groups, attempts=attempts, solved=solved)
    if as_json:
        print_json([{"name": name, "value": value} for name, value in summary.items()])
        return
    print_table(_table(summary), ("metric", "value"))
    if out is not None:
        echo(f"wrote {out}", err=True)


def _table(summary: Mapping[str, float]) -> list[dict[str, str]]:
    errors = {name.removesuffix("_stderr"): value for name, value in summary.items() if name.endswith("_stderr")}
    values = {name: value for name, value in summary.items() if not name.endswith("_stderr")}
    return [
        {"metric": name, "value": f"{value:.4g}" + (f" ± {errors[name]:.2g}" if name in errors else "")}
        for name, value in values.items()
    ]
