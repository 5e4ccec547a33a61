"""One training step traced without devices: its FLOPs, and what its backward pass keeps of each layer."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import jax
from jax.extend.core import Literal

from axlearn_core.compose import Program, compose
from axlearn_core.compose.flops import called
from axlearn_core.config import Node, find, patch
from axlearn_core.config.roles import StackRole
from axlearn_core.contracts.arrays import is_array
from axlearn_core.contracts.experiment import accumulate_steps
from axlearn_core.contracts.target import Machine
from axlearn_plugins_plan.flops import ScopedSelection, works

HEADS = ("batch", "sequence", "activation_heads", None)
STREAM = ("batch", "residual_sequence", "activation_embed")
HIDDEN = ("batch", "sequence", "activation_mlp")
ROUTED = ("batch", "activation_embed")
ROUTED_HIDDEN = ("batch", "activation_mlp")
STATISTICS = ("batch", "activation_heads", "sequence")
UNCHANGED = ("name", "sharding_constraint", "reduce_precision")
"""Primitives that do not change the numbers, but for how JAX rounds what it saves to the precision that it has."""


@attrs.frozen(kw_only=True)
class Activation:
    """An array of one layer that has the batch as its first dimension.

    Attributes:
        shape: of the whole batch, on all devices together.
        itemsize: bytes of a number.
        axes: one logical axis for each dimension.
        layers: how many layers have one.
        offloaded: whether it waits in the host's memory.
        repeated: whether another one has the same numbers: a kernel's result, and what has a tag after it.
    """

    shape: tuple[int, ...]
    itemsize: int
    axes: tuple[str | None, ...]
    layers: float
    offloaded: bool = False
    repeated: bool = False


@attrs.frozen(kw_only=True, slots=False)
class StepTrace:
    """What a training step does on any mesh.

    Attributes:
        executed: dtype -> FLOPs of all devices, recomputation included.
        kept: what the forward pass leaves for the backward pass, of the whole batch.
        layer: what a layer computes under a tag.
        routed: the rows that a layer's experts take and give, one of each width; empty without experts.
    """

    executed: Mapping[str, float]
    kept: tuple[Activation, ...]
    layer: tuple[Activation, ...]
    routed: tuple[Activation, ...] = ()

    def scaled(self, factor: float) -> "StepTrace":
        """The same of a batch of so many times the rows."""
        if factor == 1:
            return self

        def more(activations: tuple[Activation, ...]) -> tuple[Activation, ...]:
            return tuple(attrs.evolve(a, shape=(round(a.shape[0] * factor), *a.shape[1:])) for a in activations)

        executed = {dtype: flops * factor for dtype, flops in self.executed.items()}
        activations = {"kept": more(self.kept), "layer": more(self.layer), "routed": more(self.routed)}
        return attrs.evolve(self, executed=executed, **activations)

    @property
    def grouped(self) -> bool:
        """Whether it has products of groups of rows (experts)."""
        return bool(self.routed)

    @cached_property
    def stream(self) -> tuple[Activation, ...]:
        """The residual stream, as it comes into each layer; empty where no layer keeps it on the device."""
        return tuple(a for a in self.kept if a.axes == STREAM and not a.offloaded)[:1]

    @cached_property
    def distinct(self) -> tuple[Activation, ...]:
        """What is kept, without what is repeated: as XLA keeps it where JAX does not round what a policy saves."""
        return tuple(a for a in self.kept if not a.repeated)

    @cached_property
    def tagged(self) -> tuple[Activation, ...]:
        """The residual stream, and all that has a tag."""
        return (*self.stream, *self.layer)

    @cached_property
    def hidden(self) -> tuple[Activation, ...]:
        """The largest between the products of a layer's feed-forward network; empty where nothing there is known."""
        return _largest(a for a in (*self.layer, *self.routed) if a.axes in (HIDDEN, ROUTED_HIDDEN))

    @cached_property
    def heads(self) -> tuple[Activation, ...]:
        """The largest with heads of attention, likewise."""
        return _largest(a for a in self.layer if a.axes == HEADS)

    @cached_property
    def routed_stream(self) -> tuple[Activation, ...]:
        """The rows of the residual stream as experts take them, one for each that is chosen; empty without experts."""
        return tuple(a for a in self.routed if a.axes == ROUTED)

    @property
    def flops(self) -> float:
        """Of all dtypes."""
        return sum(self.executed.values())


def alone(config: Node[Any]) -> Node[Any]:
    """The config for one device, whole batches and a loop over layers, whose trace shows what each layer keeps."""
    edits: dict[str, Any] = {"mesh.shape": {"fsdp": 1}}
    if accumulate_steps(config) != 1:
        edits["learner.accumulate_steps"] = 1
    for path, stack in find(config, StackRole).items():
        if stack.mode == "unrolled":
            edits[f"{path}.mode"] = "scan"
    return patch(config, edits)


def program_alone(config: Node[Any], machine: Machine) -> Program:
    """The program of `alone` with the kernels of the machine. Its one device is the CPU, since it is traced and never run."""
    one = attrs.evolve(machine, chips=1, domains=1, chips_per_host=1)
    return compose(alone(config), jax.devices("cpu")[:1], machine=one)  # type: ignore[arg-type]


def trace_step(program: Program, batch: Mapping[str, Any]) -> StepTrace:
    """Traces the training step of a program on one device."""
    selection = ScopedSelection(platform=program.platform, target=program.selection("train").target)
    with program.tracing("train", selection):
        step = program.function("train").call
        jaxpr = jax.make_jaxpr(lambda *args: step(*args))(*program.arguments("train", batch)).jaxpr
    executed: dict[str, float] = {}
    for work in works(jaxpr, selection.scopes):
        flops = work.flops * (work.visible if work.kernel else 1.0)
        executed[work.dtype] = executed.get(work.dtype, 0.0) + flops
    rows = max((s.shape[0] for s in batch.values() if s.shape), default=0)
    saved: list[Activation] = []
    layer: list[Activation] = []
    for scan, times in _stacks(jaxpr, 1.0):
        body = scan.params["jaxpr"].jaxpr
        # What is stacked has one more axis outside than in the body; JAX's name for their number differs by version.
        carries = sum(o.aval.ndim == b.aval.ndim for o, b in zip(scan.outvars, body.outvars, strict=True))
        carried = [v.aval.shape for v in body.outvars[:carries] if v.aval.ndim == 3]
        length, width = (max((shape[axis] for shape in carried), default=0) for axis in (1, 2))
        count = times * scan.params["length"]
        stacked = body.outvars[carries:]
        saved += _activations(stacked, rows, length, width, count, repeated_outputs(stacked, body.eqns))
        layer += _activations([v for e in _names(body) for v in e.outvars], rows, length, width, count)
    products = [scope.op for scope in selection.scopes if scope.op.name == "grouped_matmul"]
    return StepTrace(executed=executed, kept=tuple(saved), layer=tuple(layer), routed=tuple(_routed(products, saved)))


def _routed(products: Sequence[Any], saved: Sequence[Activation]) -> Iterator[Activation]:
    """One activation for each width of the rows of products by groups."""
    widths = {a.shape[-1] for a in saved if a.axes == STREAM}
    layers = max((a.layers for a in saved), default=1.0)
    shapes = {
        (op.lhs.shape[0], n): op.lhs.dtype.itemsize for op in products for n in (op.lhs.shape[1], op.rhs.shape[2])
    }
    for shape, itemsize in sorted(shapes.items()):
        axes = ROUTED if shape[1] in widths else ROUTED_HIDDEN
        yield Activation(shape=shape, itemsize=itemsize, axes=axes, layers=layers)


def _largest(activations: Iterable[Activation]) -> tuple[Activation, ...]:
    """The one of most bytes; empty where there is none."""
    return tuple(sorted(activations, key=lambda a: math.prod(a.shape) * a.itemsize)[-1:])


def _stacks(jaxpr: Any, times: float) -> Iterator[tuple[Any, float]]:
    """The forward loops over layers, which have tags in them, and how often each runs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and not equation.params["reverse"]:
            body = equation.params["jaxpr"].jaxpr
            if any(True for _ in _names(body)):
                yield equation, times
                continue
            yield from _stacks(body, times * equation.params["length"])
        elif (inner := called(equation.params)) is not None:
            yield from _stacks(inner, times)


def _names(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation
        elif equation.primitive.name == "scan":
            yield from _names(equation.params["jaxpr"].jaxpr)
        elif (inner := called(equation.params)) is not None:
            yield from _names(inner)


def repeated_outputs(stacked: Sequence[Any], equations: Sequence[Any]) -> set[Any]:
    """Of what the body of a loop stacks, that which has the numbers of something before it in the stack."""
    unchanged = {e.outvars[0]: e.invars[0] for e in equations if e.primitive.name in UNCHANGED}
    origins, repeated = set(), set()
    for variable in stacked:
        origin = variable
        while not isinstance(origin, Literal) and origin in unchanged:
            origin = unchanged[origin]
        if isinstance(origin, Literal):
            continue
        if origin in origins:
            repeated.add(variable)
        origins.add(origin)
    return repeated


def _activations(
    variables: Sequence[Any], rows: int, length: int, width: int, layers: float, repeated: Collection[Any] = ()
) -> Iterator[Activation]:
    for variable in variables:
        aval = variable.aval
        if not is_array(aval) or aval.ndim < 2 or aval.shape[0] != rows:
            continue
        yield Activation(
            shape=tuple(aval.shape),
            itemsize=aval.dtype.itemsize,
            axes=logical_axes(aval.shape, length, width),
            layers=layers,
            offloaded="host" in str(aval.memory_space).lower(),
            repeated=variable in repeated,
        )


def logical_axes(shape: Sequence[int], length: int, width: int) -> tuple[str | None, ...]:
    """The logical axes of an activation by its shape, where nothing names them.

    Args:
        shape: batch first.
        length: of the sequence.
        width: of the residual stream.
    """
    if len(shape) == 4:
        return HEADS
    if len(shape) == 3 and shape[1] != length:
        return STATISTICS
    if len(shape) == 3:
        return STREAM if shape[2] == width else HIDDEN
    return ("batch", *(None,) * (len(shape) - 1))


def whole_bytes(activations: Sequence[Activation]) -> float:
    """Of all layers and all devices."""
    return sum(math.prod(a.shape) * a.itemsize * a.layers for a in activations)
