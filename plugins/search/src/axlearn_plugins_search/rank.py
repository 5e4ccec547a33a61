"""Every legal layout of a request on one machine with its estimate, best first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from axlearn_core.compose import Program
from axlearn_core.compose.devices import absent, settle
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, parse_feature
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.batches import abstract_batch
from axlearn_plugins_plan.plan import machine_of
from axlearn_plugins_plan.predict import predict
from axlearn_plugins_plan.tags import tags
from axlearn_plugins_search.estimate import Estimate, MeshFigures, estimate
from axlearn_plugins_search.figures import Coefficients, coefficients
from axlearn_plugins_search.space import Choice, MeshChoice, batch_shards, meshes, microbatches, remat_options
from axlearn_plugins_search.trace import StepTrace, program_alone, trace_step

FREE = ("data", "fsdp", "tensor")
"""The mesh axes whose sizes a search changes; `pipeline` too where the experiment has it. `seq` and `expert` stay."""


@attrs.frozen(kw_only=True)
class Ranked:
    """A layout and what the formulas say of it.

    Attributes:
        seconds: of a step: predicted where the target has published or measured steps, else at the roofline where nothing
            overlaps.
        tokens: of a step; None for a batch without tokens.
    """

    choice: Choice
    machine: Machine
    estimate: Estimate
    seconds: float
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

    def __attrs_post_init__(self) -> None:
        resolved = resolve(self.request)
        self.machine = machine_of(resolved)
        self.fitted = coefficients(self.machine.target)
        self.base = resolved.config
        settle(self.machine)
        self.devices = absent(self.machine)
        self.batch = abstract_batch(self.base)
        self.program = program_alone(self.base, self.machine, self.devices)
        self.grouped = False

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
                kept = tuple(f for f in request.features if f.name != "remat")
                request = attrs.evolve(request, features=(*kept, parse_feature(remat)))
            program = program_alone(resolve(request).config, self.machine, self.devices)
            self._programs[remat] = program, trace_step(program, self.batch)
        return self._programs[remat][1]

    def remats(self) -> dict[str | None, StepTrace]:
        """Option -> trace, without those that keep as much as another and compute no less."""
        found: dict[str | None, StepTrace] = {None: self.traced(None)}
        if "remat" not in registry().claims["features"]:
            return found
        names = [t.name for t in tags(self.program, self.batch)]
        for option in remat_options(self.base, names):
            try:
                found[option] = self.traced(option)
            except RequestError:  # a model without such a stack
                continue
        whole = MeshChoice(shape={"fsdp": 1})
        figures = MeshFigures(self.program, self.base, attrs.evolve(self.machine, chips=1, domains=1), whole)
        sizes = {o: (figures.local(t.kept), t.flops) for o, t in found.items()}

        def worse(option: str | None) -> bool:
            kept, flops = sizes[option]
            others = [(o, s) for o, s in sizes.items() if o != option]
            order = list(sizes)
            return option is not None and any(
                k <= kept and f <= flops and ((k, f) != (kept, flops) or order.index(o) < order.index(option))
                for o, (k, f) in others
            )

        return {o: t for o, t in found.items() if not worse(o)}

    def base_steps(self) -> int:
        """Microbatches, as the request has them."""
        return getattr(getattr(self.base, "learner", None), "accumulate_steps", 1)

    def ranked(self, progress: Callable[[str], None] = lambda _: None) -> list[Ranked]:
        """All legal layouts, the fastest first; of equally fast ones that which takes least memory.

        Raises:
            RequestError: there is none.
        """
        shipped_mesh = MeshChoice(shape={a: n for a, n in self.base.mesh.sizes(self.machine.devices).items() if n > 1})
        free = tuple(a for a in ("pipeline", *FREE) if a != "pipeline" or shipped_mesh.shape.get("pipeline", 1) > 1)
        on = [MeshFigures(self.program, self.base, self.machine, m) for m in meshes(self.program, self.base, self.machine, free)]
        progress(f"{self.machine.name}: {len(on)} meshes")
        remats = self.remats()
        progress(f"{self.machine.name}: {len(remats)} ways of rematerialisation")
        found = []
        installed = registry().claims["features"]
        layers = max((a.layers for t in remats.values() for a in t.kept), default=1.0)
        for figures in on:
            same = dict(figures.choice.shape) == dict(shipped_mesh.shape) and not figures.choice.stream
            shards = batch_shards(self.base.mesh, figures.choice)
            if self.rows % shards:
                continue
            steps = microbatches(self.rows, shards) if "gradient-accumulation" in installed else [self.base_steps()]
            for remat, trace in remats.items():
                for count in steps:
                    for offload in (False, True) if "offload-optimizer" in installed else (False,):
                        choice = Choice(
                            mesh=None if same else figures.choice,
                            remat=remat,
                            microbatches=None if count == self.base_steps() else count,
                            offload_optimizer=offload,
                        )
                        found.append(self._rank(choice, figures, trace, layers, count))
        if not found:
            raise RequestError(
                f"no layout of {self.request.experiment} is legal on {self.machine.name}\n"
                f"    got: {self.rows} rows on {self.machine.devices} devices, {len(on)} meshes that parameters can be laid on\n"
                "    fix: give a batch that more devices divide (--set input.batch_size=N), or take another --target"
            )
        return sorted(found, key=lambda r: (r.seconds, r.estimate.total, len(r.choice.words), r.choice.words))

    def _rank(self, choice: Choice, figures: MeshFigures, trace: StepTrace, layers: float, steps: int) -> Ranked:
        batch_bytes = sum(s.size * s.dtype.itemsize for s in self.batch.values())
        found = estimate(choice, figures, trace, layers, steps, batch_bytes, self.fitted)
        return Ranked(
            choice=choice,
            machine=self.machine,
            estimate=found,
            seconds=step_seconds(self.machine, found.roofline, trace.grouped > 0),
            tokens=self.tokens,
        )


def step_seconds(machine: Machine, bound: Any, grouped: bool) -> float:
    """Predicted where the target has rows, else the roofline where nothing overlaps."""
    prediction = predict(machine, bound, grouped=grouped)
    return prediction.seconds if prediction is not None else bound.serial or 0.0


def spaces(request: Request, machines: Sequence[str], vary: Sequence[str]) -> list[Space]:
    """One space for each machine."""
    return [Space(attrs.evolve(request, target=m), tuple(vary)) for m in machines]


def varied(names: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """`--vary batch,optimizer-precision` as names.

    Raises:
        RequestError: one of them is not known.
    """
    from axlearn_core.errors import unknown

    found = tuple(n.strip() for n in (names or "").split(",") if n.strip())
    for name in found:
        if name not in known:
            raise unknown("part of a layout that --vary takes", name, known)
    return found


__all__ = ["ConfigError", "Mapping", "Ranked", "Space", "spaces", "step_seconds", "varied"]
