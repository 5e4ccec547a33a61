"""Enumerate the legal pipeline schedules of a layout, and model their cost."""

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
MAX_STAGES = 32
MAX_MICROBATCHES = 128
ROUNDS = 2


@attrs.frozen(kw_only=True)
class Pipeline:
    """A pipeline schedule, with the `pipeline` feature's options.

    Attributes:
        stages: Size of the `pipeline` mesh axis.
        microbatches: Microbatches per step.
        schedule: One of `SCHEDULES`.
        rounds: Chunks of layers per stage. Only interleaved schedules have more than one.
    """

    stages: int
    microbatches: int
    schedule: str = "gpipe"
    rounds: int = 1

    @property
    def feature(self) -> str:
        """Value of `--with`."""
        rounds = f",rounds={self.rounds}" if self.schedule == "interleaved" else ""
        return f"pipeline:microbatches={self.microbatches},schedule={self.schedule}{rounds}"

    @property
    def chunks(self) -> int:
        """Number of chunks of layers across all stages."""
        return self.stages * self.rounds

    @property
    def ticks(self) -> int:
        """Length of a pass, in units of the time that a chunk takes to process a microbatch."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def stretch(self) -> float:
        """Slowdown from idle stages: `ticks` divided by the ticks with work (Narayanan et al., 2021)."""
        return self.ticks / (self.rounds * self.microbatches)

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes the layers from the stage inputs."""
        return self.schedule == "1f1b"


def schedules(request: Request) -> tuple[str, ...]:
    """Return the schedules that can be added to a request without causing new config problems."""
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
    """Return the config paths with problems, such as missing data."""
    resolved = resolve(request)
    try:
        resolved.check()
    except ConfigError as error:
        return {p.path for p in error.problems}
    return set()


def with_pipeline(request: Request, pipeline: Pipeline) -> Request:
    """Return the request with a different schedule."""
    features = tuple(f for f in request.features if f.name != "pipeline")
    return attrs.evolve(request, features=(*features, parse_feature(pipeline.feature)))


def layer_counts(program: Program) -> set[int]:
    """Return the number of layers in each stack, without duplicates."""
    trained = program.trained
    return {
        size
        for path, spec in trained.abstract.items()
        for size, axis in zip(spec.shape, trained.axes[path], strict=True)
        if axis == "layers"
    }


def read_pipeline(config: Node[Any], stages: int) -> Pipeline | None:
    """Return the schedule of a config. Return None if there is one stage or no schedule."""
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
    """Yield the schedules that split the layers equally, with at least one row of each microbatch per device.

    There are at least twice as many microbatches as stages. With fewer, stages are idle for more than a third of the time.

    Args:
        shape: Shape of the mesh.
        rows: Rows per step.
        shards: Number of devices that the rows are sharded over.
        layers: Number of layers in each stack.
        names: Names of the schedules.
    """
    stages = shape.get("pipeline", 1)
    if stages == 1 or stages > MAX_STAGES or not layers:
        return
    for name in names:
        rounds = ROUNDS if name == "interleaved" else 1
        if any(count % (stages * rounds) for count in layers):
            continue
        count = 2 * stages if rounds > 1 else 2 ** math.ceil(math.log2(2 * stages))
        while count <= MAX_MICROBATCHES and rows % (count * shards) == 0:
            yield Pipeline(stages=stages, microbatches=count, schedule=name, rounds=rounds)
            count *= 2
