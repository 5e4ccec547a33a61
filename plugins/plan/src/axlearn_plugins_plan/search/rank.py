"""Every legal layout of a request on one machine with its estimate, best first."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from axlearn_core.compose import Program
from axlearn_core.config import find, patch
from axlearn_core.config.roles import StackRole
from axlearn_core.contracts.experiment import accumulate_steps
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError, unknown
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, parse_feature
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.batches import abstract_batch
from axlearn_plugins_plan.plan import machine_of
from axlearn_plugins_plan.predict import predict
from axlearn_plugins_plan.search.estimate import Estimate, Work, estimate, with_host
from axlearn_plugins_plan.search.figures import Coefficients, coefficients
from axlearn_plugins_plan.search.held import check_varied, held_parts
from axlearn_plugins_plan.search.on_mesh import MeshFigures
from axlearn_plugins_plan.search.pipelines import (
    Pipeline,
    layer_counts,
    pipeline_of,
    pipelines,
    schedules,
    with_pipeline,
)
from axlearn_plugins_plan.search.space import Choice, MeshChoice, meshes, microbatches, remat_options
from axlearn_plugins_plan.search.trace import StepTrace, program_alone, trace_step
from axlearn_plugins_plan.tags import tags

FREE = ("data", "fsdp", "tensor")
"""The mesh axes whose sizes a search changes, and `pipeline` where the request can be given one. `seq` and `expert` stay."""
ACCUMULATION = "gradient-accumulation"
OFFLOAD = "offload-optimizer"


@attrs.frozen(kw_only=True)
class Ranked:
    """A layout and what the formulas say of it.

    Attributes:
        seconds: of a step: predicted where the target has published or measured steps, else at the roofline where nothing
            overlaps.
        rows: of a step's batch.
        tokens: of a step; None for a batch without tokens.
    """

    choice: Choice
    machine: Machine
    estimate: Estimate
    seconds: float
    rows: int
    tokens: int | None


@attrs.define(eq=False, slots=False)
class Space:
    """The layouts of one request on one machine."""

    request: Request
    vary: tuple[str, ...]
    machine: Machine = attrs.field(init=False)
    base: Any = attrs.field(init=False)
    fitted: Coefficients = attrs.field(init=False)
    _programs: dict[Any, tuple[Program, StepTrace]] = attrs.field(init=False, factory=dict)
    _traces: dict[Any, StepTrace] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        resolved = resolve(self.request)
        self.machine = machine_of(resolved)
        self.fitted = coefficients(self.machine.target)
        self.base = resolved.config
        self.batch = abstract_batch(self.base)
        self.program = program_alone(self.base, self.machine)
        self.held = held_parts(self.request)
        check_varied(self.vary, self.held)

    @property
    def rows(self) -> int:
        """Of a step, as the request has it."""
        return max((s.shape[0] for s in self.batch.values() if s.shape), default=0)

    @property
    def tokens(self) -> int | None:
        """Of a step, as the request has it."""
        return int(self.batch["tokens"].size) if "tokens" in self.batch else None

    def traced(self, remat: str | None) -> StepTrace:
        """The step of the request with another rematerialisation."""
        if remat not in self._programs:
            request = self.request
            if remat is not None:
                features = tuple(f for f in request.features if f.name != "remat")
                request = attrs.evolve(request, features=(*features, parse_feature(remat)))
            program = program_alone(resolve(request).config, self.machine)
            self._programs[remat] = program, trace_step(program, self.batch)
        return self._programs[remat][1]

    def remats(self) -> dict[str | None, StepTrace]:
        """Option -> trace, without those that keep as much as another and compute no less."""
        traces: dict[str | None, StepTrace] = {None: self.traced(None)}
        if not self.varies_feature("remat"):
            return traces
        host = self.machine.target.platform == "tpu"
        for option in remat_options(tags(self.program, self.batch), host):
            try:
                traces[option] = self.traced(option)
            except RequestError:  # a model without such a stack
                continue
        whole = MeshChoice(shape={"fsdp": 1})
        figures = MeshFigures(self.program, self.base, attrs.evolve(self.machine, chips=1, domains=1), whole)
        sizes = {o: (figures.local(t.kept), figures.local(t.kept, offloaded=True), t.flops) for o, t in traces.items()}
        order = list(sizes)

        def as_good(one: str | None, other: str | None) -> bool:
            equal = sizes[one] == sizes[other]
            return all(a <= b for a, b in zip(sizes[one], sizes[other], strict=True)) and (
                not equal or order.index(one) < order.index(other)
            )

        return {o: t for o, t in traces.items() if o is None or not any(as_good(p, o) for p in sizes if p != o)}

    def varies_feature(self, name: str) -> bool:
        """Whether the feature is installed and the request does not set what it sets."""
        return name in registry().claims["features"] and name not in self.held

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that the request can be given."""
        # What a schedule repeats is told from traces that rematerialise all and nothing, which a fixed remat has not.
        return schedules(self.request) if self.varies_feature("pipeline") and "remat" not in self.held else ()

    @cached_property
    def layers(self) -> set[int]:
        """The sizes of the stacks of layers."""
        return layer_counts(self.program)

    @cached_property
    def layer_flops(self) -> tuple[dict[str, float], dict[str, float]]:
        """(of the layers in a step, of their forward pass alone): dtype -> FLOPs of all devices.

        Two steps with other rematerialisations differ by what they compute again, and a backward pass takes twice the FLOPs of
        a forward one.
        """
        everything, nothing = self.traced("remat:policy=everything"), self.traced("remat:policy=full")
        forward = {d: max(0.0, f - everything.executed.get(d, 0.0)) for d, f in nothing.executed.items()}
        return {d: 4 * f for d, f in forward.items()}, forward

    @cached_property
    def everything(self) -> StepTrace:
        """The step with layers that compute nothing again."""
        edits = {f"{path}.remat": None for path, stack in find(self.base, StackRole).items() if stack.remat is not None}
        return trace_step(program_alone(patch(self.base, edits), self.machine), self.batch)

    def base_steps(self) -> int:
        """Microbatches, as the request has them."""
        return accumulate_steps(self.base)

    def ranked(self, progress: Callable[[str], None] = lambda _: None) -> list[Ranked]:
        """All legal layouts, the fastest for each row of a batch first; of equally fast ones that of least memory.

        Raises:
            RequestError: there is none.
        """
        own = {a: n for a, n in self.base.mesh.sizes(self.machine.devices).items() if n > 1} or {"fsdp": 1}
        on = [*self._meshes(own, staged=False), *self._meshes(own, staged=True)]
        remats = self.remats()
        unchanged = f"; kept as requested: {', '.join(sorted(self.held))}" if self.held else ""
        progress(f"{self.machine.name}: {len(on)} meshes, {len(remats)} ways of rematerialisation{unchanged}")
        rows = [
            self.estimated(choice, figures)
            for figures in on
            for choice in self._choices(figures, dict(figures.choice.shape) == own, remats)
        ]
        rows = [row for row in rows if row.choice.shipped or row.estimate.host.fits(self.machine.target)]
        if not rows:
            raise RequestError(
                f"no layout of {self.request.experiment} is legal on {self.machine.name}\n"
                f"    got: {self.rows} rows on {self.machine.devices} devices, {len(on)} meshes that parameters can be laid on\n"
                "    fix: give a batch that more devices divide (--set input.batch_size=N), or take another --target"
            )
        return sorted(rows, key=order)

    def _meshes(self, own: dict[str, int], staged: bool) -> Iterator[MeshFigures]:
        """The meshes of one stage; with `staged` those of several, under the rules that the feature `pipeline` makes."""
        base = self.base
        if staged and not self.schedules and own.get("pipeline", 1) == 1:
            return
        if staged and self.schedules:
            example = Pipeline(stages=1, microbatches=1, schedule=self.schedules[0])
            base = resolve(with_pipeline(self.request, example)).config
        for mesh in meshes(self.program, base, self.machine, ("pipeline", *FREE) if staged else FREE):
            if ("mesh" in self.held and mesh.shape != own) or ("stream" in self.held and mesh.stream):
                continue
            if (mesh.shape.get("pipeline", 1) > 1) == staged:
                yield MeshFigures(self.program, base, self.machine, mesh)

    def _works(self, figures: MeshFigures, rows: int, own: bool) -> Iterator[Pipeline | None]:
        """The schedules on one mesh: None keeps the request's."""
        shape = figures.choice.shape
        if shape.get("pipeline", 1) == 1 or own:
            yield None
        elif self.base_steps() == 1 or self.varies_feature(ACCUMULATION):  # the schedule has microbatches of its own
            yield from pipelines(shape, rows, figures.batch_shards, self.layers, self.schedules)

    def _choices(self, figures: MeshFigures, own: bool, remats: Mapping[str | None, StepTrace]) -> Iterator[Choice]:
        """Every layout on one mesh, `own` where it is that of the request."""
        staged = figures.choice.shape.get("pipeline", 1) > 1
        # libtpu refuses most programs that keep activations of stages in the host's memory.
        options = [o for o, t in remats.items() if not staged or o is None or not any(a.offloaded for a in t.kept)]
        mesh, shards = attrs.evolve(figures.choice, requested="mesh" in self.held), figures.batch_shards
        now = self.base_steps()
        batches = [self.rows * 2**n for n in range(-2, 3)] if "batch" in self.vary else [self.rows]
        dtypes = (None, "bfloat16") if "optimizer-precision" in self.vary else (None,)
        offloads = (False, True) if self.varies_feature(OFFLOAD) else (False,)
        for rows in batches:
            if rows % shards:
                continue
            counts = [now]
            if self.varies_feature(ACCUMULATION) and not (staged and own):
                counts = [1] if staged else microbatches(rows, shards)
            places = (False,) if staged else offloads
            works = self._works(figures, rows, own and not mesh.stream)
            for pipeline, remat, count, offload, dtype in itertools.product(works, options, counts, places, dtypes):
                yield Choice(
                    pipeline=pipeline,
                    mesh=None if own and not mesh.stream else mesh,
                    remat=remat,
                    microbatches=None if count == now else count,
                    offload_optimizer=offload,
                    batch=None if rows == self.rows else rows,
                    optimizer_dtype=dtype,
                )

    def _scale_trace(self, trace: StepTrace, factor: float) -> StepTrace:
        key = id(trace), factor
        if key not in self._traces:
            self._traces[key] = trace.scaled(factor)
        return self._traces[key]

    def _work(self, pipeline: Pipeline | None, factor: float) -> Work:
        if pipeline is None:
            return Work()
        layers, forward = ({dtype: flops * factor for dtype, flops in table.items()} for table in self.layer_flops)
        everything = self._scale_trace(self.everything, factor)
        return Work(pipeline=pipeline, layer_flops=layers, forward_flops=forward, everything=everything)

    def estimated(self, choice: Choice, figures: MeshFigures) -> Ranked:
        """One layout on its mesh."""
        trace = self.traced(choice.remat)
        factor = (choice.batch or self.rows) / self.rows
        batch_bytes = factor * sum(s.size * s.dtype.itemsize for s in self.batch.values())
        steps = choice.microbatches or self.base_steps()
        work = self._work(choice.pipeline or pipeline_of(self.base, figures.choice.shape.get("pipeline", 1)), factor)
        figures_of = estimate(choice, figures, self._scale_trace(trace, factor), steps, batch_bytes, self.fitted, work)
        return Ranked(
            choice=choice,
            machine=self.machine,
            estimate=figures_of,
            seconds=with_host(step_seconds(self.machine, figures_of.roofline, trace.grouped), figures_of.host),
            rows=choice.batch or self.rows,
            tokens=None if self.tokens is None else round(self.tokens * factor),
        )


def order(row: Ranked) -> tuple[Any, ...]:
    """Layouts are compared by the seconds of a row of the batch, then by memory, then by how little they change.

    Differences beyond the fifth digit are of the formulas' rounding.
    """
    return float(f"{row.seconds / max(row.rows, 1):.5e}"), row.estimate.total, len(row.choice.words), row.choice.words


def step_seconds(machine: Machine, bound: Any, grouped: bool) -> float:
    """Predicted where the target has rows, else the roofline where nothing overlaps."""
    prediction = predict(machine, bound, grouped=grouped)
    return prediction.seconds if prediction is not None else bound.serial or 0.0


def spaces(request: Request, machines: Sequence[str], vary: Sequence[str]) -> list[Space]:
    """One space for each machine."""
    return [Space(attrs.evolve(request, target=m), tuple(vary)) for m in machines]


def varied(names: str | None, options: Sequence[str]) -> tuple[str, ...]:
    """`--vary batch,optimizer-precision` as names.

    Raises:
        RequestError: one of them is not known.
    """
    parts = tuple(n.strip() for n in (names or "").split(",") if n.strip())
    for name in parts:
        if name not in options:
            raise unknown("part of a layout that --vary takes", name, options)
    return parts
