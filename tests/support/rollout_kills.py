"""Kill runs on rollouts with SIGKILL at seeded moments of rollouts, rewards, updates and saves; see `random_kills`.

    PYTHONPATH=tests uv run --all-packages python -m support.rollout_kills --kills 20 --record kills.jsonl

kills each of six shapes 20 times. Losses, files of rollouts and the last checkpoint must equal those of a run that was never
killed, so no rollout is lost or used twice.
"""

from pathlib import Path

import attrs

from support import random_kills, rollout_runs
from support.paths import TESTS

CODE = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from support import rollout_run; rollout_run.main()"
MOMENTS = ("rollout", "reward", "step", "save", "update", "read", "rollout", "save", "reward", "restore")
SECONDS = random_kills.SECONDS | {"rollout": 0.05, "reward": 0.005, "update": 0.01}


@attrs.frozen
class RolloutShape(random_kills.Shape):
    """A run of `support.rollout_run`."""

    steps: int = 16
    moments: tuple = MOMENTS
    seconds: dict = SECONDS

    def command(self, run):
        return ("-c", CODE, run, "--steps", self.steps, *self.options)

    def trace(self, run, whole):
        curves, expected = rollout_runs.curves(run), rollout_runs.curves(whole)
        if curves != expected[: len(curves)]:
            return f"curves differ: {next(pair for pair in zip(curves, expected, strict=False) if pair[0] != pair[1])}"
        files, expected = rollout_runs.rollouts(run), rollout_runs.rollouts(whole)
        names = [f"step-{row['step']}.jsonl" for row in curves]
        return next((f"{name} differs" for name in names if files.get(name) != expected[name]), "")

    def is_passed(self, moment, run, job):
        if moment == "reward":
            marks = Path(f"{run}.scored")
            before = self._marks.setdefault(job.begin, marks.stat().st_size if marks.exists() else 0)
            return marks.exists() and marks.stat().st_size > before
        return job.phase() == {"rollout": "rollout", "update": "step"}[moment]

    _marks: dict = attrs.field(factory=dict, init=False, eq=False)


SHAPES = {
    shape.name: shape
    for shape in (
        RolloutShape("single-turn"),
        RolloutShape("single-turn-ahead", ("--ahead", "1")),
        RolloutShape("multi-turn", ("--turns", "3")),
        RolloutShape("multi-turn-ahead", ("--turns", "3", "--ahead", "1")),
        RolloutShape("judge", ("--judge", "--ahead", "1")),
        RolloutShape("critic", ("--feature", "ppo", "--set", "loop.dead_groups=resample")),
    )
}

if __name__ == "__main__":
    random_kills.main(SHAPES, __doc__)
