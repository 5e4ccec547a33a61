"""Pipelines as a part of a layout: which schedules are legal, and what a schedule adds to a step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.compose import Program
from axlearn_core.config import Node
from axlearn_core.config.tree import children, walk
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, parse_feature
from axlearn_core.plugins.resolve import resolve

SCHEDULES = ("gpipe", "interleaved", "1f1b")
MOST_STAGES = 32
MOST_MICROBATCHES = 128
ROUNDS = 2


@attrs.frozen(kw_only=True)
class Pipeline:
    """A schedule, as the feature `pipeline` takes it.

    Attributes:
        stages: devices on the mesh axis `pipeline`.
        microbatches: of a step.
        schedule: of `SCHEDULES`.
        rounds: chunks of layers for each stage, where the schedule is interleaved.
    """

    stages: int
    microbatches: int
    schedule: str = "gpipe"
    rounds: int = 1

    @property
    def feature(self) -> str:
        """The option of `--with`."""
        rounds = f",rounds={self.rounds}" if self.schedule == "interleaved" else ""
        return f"pipeline:microbatches={self.microbatches},schedule={self.schedule}{rounds}"

    @property
    def chunks(self) -> int:
        """Chunks of layers of all stages together."""
        return self.stages * self.rounds

    @property
    def ticks(self) -> int:
        """How long one pass takes, in times that one chunk takes for one microbatch."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def stretch(self) -> float:
        """How many times as long as without idle stages: `ticks` over those with work (Narayanan et al., 2021)."""
        return self.ticks / (self.rounds * self.microbatches)

    @property
    def recomputes(self) -> bool:
        """Whether the layers run once more, from the inputs of stages."""
        return self.schedule == "1f1b"


def schedules(request: Request) -> tuple[str, ...]:
    """The schedules that a request can be given: those with which it resolves, and passes the checks that it passes now."""
    if "pipeline" not in registry().claims["features"]:
        return ()
    base_paths = _problem_paths(request)
    legal = []
    for schedule in SCHEDULES:
        example = Pipeline(stages=1, microbatches=1, schedule=schedule, rounds=ROUNDS)
        try:
            if _problem_paths(with_pipeline(request, example)) <= base_paths:
                legal.append(schedule)
        except RequestError:
            continue
    return tuple(legal)


def _problem_paths(request: Request) -> set[str]:
    """The paths that the config's checks report, such as those of data that are not here."""
    resolved = resolve(request)
    try:
        resolved.checked()
    except ConfigError as error:
        return {p.path for p in error.problems}
    return set()


def with_pipeline(request: Request, pipeline: Pipeline) -> Request:
    """A request with another schedule."""
    features = tuple(f for f in request.features if f.name != "pipeline")
    return attrs.evolve(request, features=(*features, parse_feature(pipeline.feature)))


def layer_counts(program: Program) -> set[int]:
    """The sizes of the stacks of layers."""
    trained = program.trained
    return {
        size
        for path, spec in trained.abstract.items()
        for size, axis in zip(spec.shape, trained.axes[path], strict=True)
        if axis == "layers"
    }


def pipeline_of(config: Node[Any], stages: int) -> Pipeline | None:
    """The schedule that a config has; None on one stage, and where it has none."""
    for _, part in walk(config):
        fields = children(part)
        schedule, count = fields.get("schedule"), fields.get("microbatches")
        if stages > 1 and schedule in SCHEDULES and isinstance(count, int):
            rounds = fields["rounds"] if schedule == "interleaved" else 1
            return Pipeline(stages=stages, microbatches=count, schedule=schedule, rounds=rounds)
    return None


def pipelines(
    shape: Mapping[str, int], rows: int, shards: int, layers: set[int], names: Sequence[str]
) -> Iterator[Pipeline]:
    """The schedules of a mesh: every stage has equally many layers, and every device a row of each microbatch.

    There are at least twice as many microbatches as stages: with fewer, stages are idle for more than a third of the time.

    Args:
        shape: of the mesh.
        rows: of a step's batch.
        shards: over how many devices the rows are split.
        layers: the sizes of the stacks of layers.
        names: of the schedules.
    """
    stages = shape.get("pipeline", 1)
    if stages == 1 or stages > MOST_STAGES or not layers:
        return
    for name in names:
        rounds = ROUNDS if name == "interleaved" else 1
        if any(count % (stages * rounds) for count in layers):
            continue
        count = 2 * stages if rounds > 1 else 2 ** math.ceil(math.log2(2 * stages))
        while count <= MOST_MICROBATCHES and rows % (count * shards) == 0:
            yield Pipeline(stages=stages, microbatches=count, schedule=name, rounds=rounds)
            count *= 2
