"""Every legal layout of a request on one machine with its estimate, best first."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from axlearn_core.compose import Program
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError, unknown
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, parse_feature
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.batches import abstract_batch
from axlearn_plugins_plan.plan import machine_of
from axlearn_plugins_plan.predict import predict
from axlearn_plugins_plan.search.estimate import Estimate, MeshFigures, estimate, with_host
from axlearn_plugins_plan.search.figures import Coefficients, coefficients
from axlearn_plugins_plan.search.space import Choice, MeshChoice, batch_shards, meshes, microbatches, remat_options
from axlearn_plugins_plan.search.trace import StepTrace, program_alone, trace_step
from axlearn_plugins_plan.tags import tags

FREE = ("data", "fsdp", "tensor")
"""The mesh axes whose sizes a search changes; `pipeline` too where the experiment has it. `seq` and `expert` stay."""


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
        if "remat" not in registry().claims["features"]:
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

    def base_steps(self) -> int:
        """Microbatches, as the request has them."""
        return getattr(getattr(self.base, "learner", None), "accumulate_steps", 1)

    def ranked(self, progress: Callable[[str], None] = lambda _: None) -> list[Ranked]:
        """All legal layouts, the fastest for each row of a batch first; of equally fast ones that of least memory.

        Raises:
            RequestError: there is none.
        """
        sizes = self.base.mesh.sizes(self.machine.devices)
        own = {a: n for a, n in sizes.items() if n > 1}
        free = ("pipeline", *FREE) if sizes["pipeline"] > 1 else FREE
        all_meshes = meshes(self.program, self.base, self.machine, free)
        on = [MeshFigures(self.program, self.base, self.machine, mesh) for mesh in all_meshes]
        remats = self.remats()
        progress(f"{self.machine.name}: {len(on)} meshes, {len(remats)} ways of rematerialisation")
        rows = [
            self._rank(choice, figures, remats[choice.remat])
            for figures in on
            for choice in self._choices(figures.choice, dict(figures.choice.shape) == own, list(remats))
        ]
        if not rows:
            raise RequestError(
                f"no layout of {self.request.experiment} is legal on {self.machine.name}\n"
                f"    got: {self.rows} rows on {self.machine.devices} devices, {len(on)} meshes that parameters can be laid on\n"
                "    fix: give a batch that more devices divide (--set input.batch_size=N), or take another --target"
            )
        return sorted(rows, key=order)

    def _choices(self, mesh: MeshChoice, own: bool, remats: list[str | None]) -> Iterator[Choice]:
        """Every layout on one mesh, `own` where it is that of the request."""
        shards = batch_shards(self.base.mesh, mesh)
        now = self.base_steps()
        batches = [self.rows * 2**n for n in range(-2, 3)] if "batch" in self.vary else [self.rows]
        dtypes = (None, "bfloat16") if "optimizer-precision" in self.vary else (None,)
        offloads = (False, True) if "offload-optimizer" in registry().claims["features"] else (False,)
        for rows in batches:
            if rows % shards:
                continue
            counts = microbatches(rows, shards) if "gradient-accumulation" in registry().claims["features"] else [now]
            for remat, count, offload, dtype in itertools.product(remats, counts, offloads, dtypes):
                yield Choice(
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

    def _rank(self, choice: Choice, figures: MeshFigures, trace: StepTrace) -> Ranked:
        factor = (choice.batch or self.rows) / self.rows
        batch_bytes = factor * sum(s.size * s.dtype.itemsize for s in self.batch.values())
        steps = choice.microbatches or self.base_steps()
        figures_of = estimate(choice, figures, self._scale_trace(trace, factor), steps, batch_bytes, self.fitted)
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
