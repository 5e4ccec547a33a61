"""The section "Rollouts" of a run's report: the reward, the time, and sampled answers."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from axlearn_plugins_rl.prompts import show_prompt
from axlearn_plugins_rl.rollout_contracts import Group
from axlearn_plugins_rl.rollout_log import list_steps
from axlearn_plugins_rl.rollout_records import read_name, read_rollouts
from axlearn_plugins_tools.reporting.charts import Series, line_chart, smooth, text
from axlearn_plugins_tools.reporting.durations import clock
from axlearn_plugins_tools.reporting.page import table
from axlearn_plugins_tools.reporting.run import Run, names, points

MIN_POINTS = 20
"""Number of points from which the reward is also drawn smoothed."""
GROUPS_SHOWN, ROLLOUTS_SHOWN = 3, 4
SECONDS = {
    "step_seconds": "step, with waiting",
    "rollout_wait": "waiting for rollouts",
    "rollout_seconds": "rollouts and rewards",
    "weight_sync_seconds": "update of the engine",
    "host_seconds": "other work of the loop",
}
"""Metric of a step -> its label in the table of times."""


def draw_rollouts(run: Run) -> str:
    """Return the HTML of the section. Empty if the run has no rollouts."""
    if not points(run.train, "reward"):
        return ""
    return _draw_rewards(run) + _draw_times(run) + _draw_answers(run)


def _draw_rewards(run: Run) -> str:
    rewards = points(run.train, "reward")
    is_long = len(rewards) >= MIN_POINTS
    series = [Series(label="reward", style="raw" if is_long else "main", points=rewards)]
    if is_long:
        series.append(Series(label="smoothed", style="main", points=smooth(rewards, len(rewards) // MIN_POINTS)))
    held_out = [name for name in names(run.evaluations) if name.endswith("_reward")]
    for name, style in zip(held_out, ("second", "third", "fourth"), strict=False):
        series.append(Series(label=name, style=style, points=points(run.evaluations, name), dots=True))
    return line_chart("reward over steps", series, height=300)


def _draw_times(run: Run) -> str:
    """Return the mean seconds per step, and the time of each phase."""
    logged = [(label, [v for _, v in points(run.train, name)]) for name, label in SECONDS.items()]
    means = [(label, fmean(values)) for label, values in logged if values]
    whole = dict(means).get(SECONDS["step_seconds"])
    phases: dict[str, float] = {}
    for attempt in run.attempts:
        for phase, seconds in attempt.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    total = sum(phases.values())
    shares = [(phase, f"{clock(s)} ({s / total:.1%})") for phase, s in sorted(phases.items(), key=lambda i: -i[1])]
    figures_per_step = [(label, clock_short(s) + (f" ({s / whole:.1%})" if whole else "")) for label, s in means]
    parts = {"mean time per step": figures_per_step, "time of each phase": shares}
    figures = "".join(
        f"<figure><figcaption>{title}</figcaption>{table(rows)}</figure>" for title, rows in parts.items()
    )
    return f'<div class="split wide">{figures}</div>'


def clock_short(seconds: float) -> str:
    """Format a duration in milliseconds if it is below a second."""
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _draw_answers(run: Run) -> str:
    """Return answers of the newest and of the oldest step with files."""
    files = list_steps(run.path)
    if not files:
        return '<p class="sub">The run has no files of rollouts.</p>'
    steps = [*files]
    newest = _draw_file(steps[-1], _read_step(files[steps[-1]]))
    if len(steps) == 1:
        return newest
    older = _draw_file(steps[0], _read_step(files[steps[0]]))
    return f"{newest}<details><summary>rollouts of step {steps[0]:,}</summary>{older}</details>"


def _read_step(files: Sequence[Path]) -> list[Group]:
    """Read the files of all processes. The file of process 0, if it is in this folder, stands for all of them."""
    name = read_name(files[0].name)
    return [group for path in (files if name and name[1] else files[:1]) for group in read_rollouts(path)]


def _draw_file(step: int, groups: Sequence[Group]) -> str:
    """Return some groups, those with different rewards first."""
    chosen = sorted(groups, key=lambda group: group.is_dead)[:GROUPS_SHOWN]
    return "".join(_draw_group(step, group) for group in chosen)


def _draw_group(step: int, group: Group) -> str:
    pairs = sorted(zip(group.rollouts, group.scores, strict=True), key=lambda pair: -pair[1].value)
    best, worst = pairs[: ROLLOUTS_SHOWN // 2], pairs[ROLLOUTS_SHOWN // 2 :][-ROLLOUTS_SHOWN // 2 :]
    rows = [
        (f"reward {score.value:g}" + (f" ({score.error})" if score.error else ""), rollout.text)
        for rollout, score in [*best, *worst]
    ]
    head = f"example {text(group.example.id)} · step {step:,}"
    return f"<figure><figcaption>{head}</figcaption><pre>{text(show_prompt(group.example))}</pre>{table(rows)}</figure>"
