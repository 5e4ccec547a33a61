"""Rank every legal layout of a request on a machine by its estimate."""

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
from axlearn_plugins_plan.plan import require_machine
from axlearn_plugins_plan.predict import predict
from axlearn_plugins_plan.search.estimate import Estimate, Work, estimate, with_host
from axlearn_plugins_plan.search.figures import Coefficients, coefficients
from axlearn_plugins_plan.search.fixed_parts import check_varied, fixed_parts
from axlearn_plugins_plan.search.mesh_figures import MeshFigures
from axlearn_plugins_plan.search.pipelines import (
    Pipeline,
    layer_counts,
    pipelines,
    read_pipeline,
    schedules,
    with_pipeline,
)
from axlearn_plugins_plan.search.space import Choice, MeshChoice, meshes, microbatches, remat_options
from axlearn_plugins_plan.search.trace import StepTrace, single_device_program, trace_step
from axlearn_plugins_plan.tags import tags

FREE_AXES = ("data", "fsdp", "tensor")
"""Mesh axes whose sizes a search changes, in addition to `pipeline` if the request supports it. `seq` and `expert` stay fixed."""
ACCUMULATION = "gradient-accumulation"
OFFLOAD = "offload-optimizer"


@attrs.frozen(kw_only=True)
class RankedLayout:
    """A layout and its estimate.

    Attributes:
        choice: The layout.
        machine: The machine.
        estimate: Estimated memory and roofline.
        seconds: Time of a step. It is predicted if the target has published or measured steps, and is otherwise the roofline
            without overlap.
        rows: Rows per step.
        tokens: Tokens per step. None for a batch without tokens.
    """

    choice: Choice
    machine: Machine
    estimate: Estimate
    seconds: float
    rows: int
    tokens: int | None


@attrs.define(eq=False, slots=False)
class Space:
    """The legal layouts of a request on a machine."""

    request: Request
    vary: tuple[str, ...]
    machine: Machine = attrs.field(init=False)
    base: Any = attrs.field(init=False)
    fitted: Coefficients = attrs.field(init=False)
    _programs: dict[Any, tuple[Program, StepTrace]] = attrs.field(init=False, factory=dict)
    _traces: dict[Any, StepTrace] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        resolved = resolve(self.request)
        self.machine = require_machine(resolved)
        self.fitted = coefficients(self.machine.target)
        self.base = resolved.config
        self.batch = abstract_batch(self.base)
        self.program = single_device_program(self.base, self.machine)
        self.fixed = fixed_parts(self.request)
        check_varied(self.vary, self.fixed)

    @property
    def rows(self) -> int:
        """Rows per step in the request."""
        return max((s.shape[0] for s in self.batch.values() if s.shape), default=0)

    @property
    def tokens(self) -> int | None:
        """Tokens per step in the request, or None for a batch without tokens."""
        return int(self.batch["tokens"].size) if "tokens" in self.batch else None

    def trace_remat(self, remat: str | None) -> StepTrace:
        """Trace the request's step with a different rematerialization option, in the form that `--with` accepts."""
        if remat not in self._programs:
            request = self.request
            if remat is not None:
                features = tuple(f for f in request.features if f.name != "remat")
                request = attrs.evolve(request, features=(*features, parse_feature(remat)))
            program = single_device_program(resolve(request).config, self.machine)
            self._programs[remat] = program, trace_step(program, self.batch)
        return self._programs[remat][1]

    def remats(self) -> dict[str | None, StepTrace]:
        """Return the trace of each option, excluding options that another option matches or beats in both memory and FLOPs."""
        traces: dict[str | None, StepTrace] = {None: self.trace_remat(None)}
        if not self.varies_feature("remat"):
            return traces
        host = self.machine.target.platform == "tpu"
        for option in remat_options(tags(self.program, self.batch), host):
            try:
                traces[option] = self.trace_remat(option)
            except RequestError:  # the model has no stack with these tags
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
        """Return True if the feature is installed and the request does not set the same part of the layout."""
        return name in registry().claims["features"] and name not in self.fixed

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """Pipeline schedules that the request supports."""
        # A schedule's FLOPs are derived from traces with full rematerialization and with none, so remat must not be fixed.
        return schedules(self.request) if self.varies_feature("pipeline") and "remat" not in self.fixed else ()

    @cached_property
    def layers(self) -> set[int]:
        """The distinct layer counts of the stacks."""
        return layer_counts(self.program)

    @cached_property
    def layer_flops(self) -> tuple[dict[str, float], dict[str, float]]:
        """(dtype -> FLOPs in the layers per step, dtype -> FLOPs in their forward pass), on all devices.

        A step with full recomputation runs one more forward pass than a step without. A backward pass has twice the FLOPs of a
        forward pass.
        """
        full, nothing = self.trace_remat("remat:policy=everything"), self.trace_remat("remat:policy=full")
        forward = {d: max(0.0, f - full.executed_flops.get(d, 0.0)) for d, f in nothing.executed_flops.items()}
        return {d: 4 * f for d, f in forward.items()}, forward

    @cached_property
    def full_trace(self) -> StepTrace:
        """Trace of the step without recomputation in the layers."""
        edits = {f"{path}.remat": None for path, stack in find(self.base, StackRole).items() if stack.remat is not None}
        return trace_step(single_device_program(patch(self.base, edits), self.machine), self.batch)

    def base_steps(self) -> int:
        """Return the number of microbatches in the request."""
        return accumulate_steps(self.base)

    def rank_layouts(self, progress: Callable[[str], None] = lambda _: None) -> list[RankedLayout]:
        """Return all legal layouts, sorted by time per row of the batch, then by memory.

        Raises:
            RequestError: No layout is legal.
        """
        base_shape = {a: n for a, n in self.base.mesh.sizes(self.machine.devices).items() if n > 1} or {"fsdp": 1}
        mesh_figures = [*self._meshes(base_shape, staged=False), *self._meshes(base_shape, staged=True)]
        remats = self.remats()
        unchanged = f"; set by the request: {', '.join(sorted(self.fixed))}" if self.fixed else ""
        progress(f"{self.machine.name}: {len(mesh_figures)} meshes, {len(remats)} remat options{unchanged}")
        rows = [
            self.estimate_choice(choice, figures)
            for figures in mesh_figures
            for choice in self._choices(figures, dict(figures.choice.shape) == base_shape, remats)
        ]
        rows = [row for row in rows if row.choice.shipped or row.estimate.host.fits(self.machine.target)]
        if not rows:
            raise RequestError(
                f"no layout of {self.request.experiment} is legal on {self.machine.name}\n"
                f"    got: {self.rows} rows on {self.machine.devices} devices, "
                f"{len(mesh_figures)} meshes that can shard the parameters\n"
                "    fix: set a batch size that more devices divide (--set input.batch_size=N), or choose another --target"
            )
        return sorted(rows, key=sort_key)

    def _meshes(self, base_shape: dict[str, int], staged: bool) -> Iterator[MeshFigures]:
        """Yield the meshes without stages or, if `staged`, the meshes with stages and the `pipeline` feature's mesh rules."""
        base = self.base
        if staged and not self.schedules and base_shape.get("pipeline", 1) == 1:
            return
        if staged and self.schedules:
            example = Pipeline(stages=1, microbatches=1, schedule=self.schedules[0])
            base = resolve(with_pipeline(self.request, example)).config
        for mesh in meshes(self.program, base, self.machine, ("pipeline", *FREE_AXES) if staged else FREE_AXES):
            if ("mesh" in self.fixed and mesh.shape != base_shape) or ("stream" in self.fixed and mesh.stream):
                continue
            if (mesh.shape.get("pipeline", 1) > 1) == staged:
                yield MeshFigures(self.program, base, self.machine, mesh)

    def _pipelines(self, figures: MeshFigures, rows: int, is_base: bool) -> Iterator[Pipeline | None]:
        """Yield the schedules to try on a mesh. None keeps the request's schedule."""
        shape = figures.choice.shape
        if shape.get("pipeline", 1) == 1 or is_base:
            yield None
        elif self.base_steps() == 1 or self.varies_feature(ACCUMULATION):  # a schedule sets its own microbatches
            yield from pipelines(shape, rows, figures.batch_shards, self.layers, self.schedules)

    def _choices(self, figures: MeshFigures, is_base: bool, remats: Mapping[str | None, StepTrace]) -> Iterator[Choice]:
        """Yield every layout on a mesh. `is_base` means that the mesh has the same shape as the request's mesh."""
        staged = figures.choice.shape.get("pipeline", 1) > 1
        # libtpu rejects most programs that offload activations of pipeline stages to host memory.
        options = [o for o, t in remats.items() if not staged or o is None or not any(a.offloaded for a in t.kept)]
        mesh, shards = attrs.evolve(figures.choice, requested="mesh" in self.fixed), figures.batch_shards
        base_steps = self.base_steps()
        batches = [self.rows * 2**n for n in range(-2, 3)] if "batch" in self.vary else [self.rows]
        dtypes = (None, "bfloat16") if "optimizer-precision" in self.vary else (None,)
        offloads = (False, True) if self.varies_feature(OFFLOAD) else (False,)
        for rows in batches:
            if rows % shards:
                continue
            counts = [base_steps]
            if self.varies_feature(ACCUMULATION) and not (staged and is_base):
                counts = [1] if staged else microbatches(rows, shards)
            places = (False,) if staged else offloads
            pipeline_options = self._pipelines(figures, rows, is_base and not mesh.stream)
            for pipeline, remat, count, offload, dtype in itertools.product(
                pipeline_options, options, counts, places, dtypes
            ):
                yield Choice(
                    pipeline=pipeline,
                    mesh=None if is_base and not mesh.stream else mesh,
                    remat=remat,
                    microbatches=None if count == base_steps else count,
                    offload_optimizer=offload,
                    batch=None if rows == self.rows else rows,
                    optimizer_dtype=dtype,
                )

    def _scale_trace(self, trace: StepTrace, factor: float) -> StepTrace:
        key = id(trace), factor
        if key not in self._traces:
            self._traces[key] = trace.scale(factor)
        return self._traces[key]

    def _work(self, pipeline: Pipeline | None, factor: float) -> Work:
        if pipeline is None:
            return Work()
        layers, forward = ({dtype: flops * factor for dtype, flops in table.items()} for table in self.layer_flops)
        full_trace = self._scale_trace(self.full_trace, factor)
        return Work(pipeline=pipeline, layer_flops=layers, forward_flops=forward, full_trace=full_trace)

    def estimate_choice(self, choice: Choice, figures: MeshFigures) -> RankedLayout:
        """Estimate a layout on its mesh."""
        trace = self.trace_remat(choice.remat)
        factor = (choice.batch or self.rows) / self.rows
        batch_bytes = factor * sum(s.size * s.dtype.itemsize for s in self.batch.values())
        steps = choice.microbatches or self.base_steps()
        work = self._work(choice.pipeline or read_pipeline(self.base, figures.choice.shape.get("pipeline", 1)), factor)
        result = estimate(choice, figures, self._scale_trace(trace, factor), steps, batch_bytes, self.fitted, work)
        return RankedLayout(
            choice=choice,
            machine=self.machine,
            estimate=result,
            seconds=with_host(step_seconds(self.machine, result.roofline, trace.has_grouped_matmuls), result.host),
            rows=choice.batch or self.rows,
            tokens=None if self.tokens is None else round(self.tokens * factor),
        )


def sort_key(row: RankedLayout) -> tuple[Any, ...]:
    """Return a key that sorts layouts by time per row of the batch, then by memory, then by the number of changes.

    Times are rounded to six digits to ignore rounding errors in the formulas.
    """
    return float(f"{row.seconds / max(row.rows, 1):.5e}"), row.estimate.total, len(row.choice.words), row.choice.words


def step_seconds(machine: Machine, bound: Any, grouped: bool) -> float:
    """Predict the time of a step. Falls back to the roofline without overlap if the target has no known steps."""
    prediction = predict(machine, bound, grouped=grouped)
    return prediction.seconds if prediction is not None else bound.serial or 0.0


def spaces(request: Request, machines: Sequence[str], vary: Sequence[str]) -> list[Space]:
    """Return a space of layouts for each machine."""
    return [Space(attrs.evolve(request, target=m), tuple(vary)) for m in machines]


def parse_vary(names: str | None, options: Sequence[str]) -> tuple[str, ...]:
    """Parse the names passed to `--vary`, such as `batch,optimizer-precision`.

    Raises:
        RequestError: A name is unknown.
    """
    parts = tuple(n.strip() for n in (names or "").split(",") if n.strip())
    for name in parts:
        if name not in options:
            raise unknown("part of a layout that --vary accepts", name, options)
    return parts
