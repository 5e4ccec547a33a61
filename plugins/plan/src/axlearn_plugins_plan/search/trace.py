"""Trace a training step without devices, and collect its FLOPs and the activations that each layer saves."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import jax
from jax.extend.core import Literal

from axlearn_core.compose import Program, compose
from axlearn_core.compose.flops import called, loop_carries
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
"""Primitives that do not change the values, except that JAX rounds saved values to their own precision."""


@attrs.frozen(kw_only=True)
class Activation:
    """An activation in a layer. Its first dimension is the batch.

    Attributes:
        shape: Global shape for the whole batch.
        itemsize: Bytes per element.
        axes: Logical axis of each dimension.
        layers: Number of layers with this activation.
        offloaded: Whether it is in host memory.
        repeated: Whether it duplicates the values of an earlier activation, such as the tagged copy of a kernel's result.
    """

    shape: tuple[int, ...]
    itemsize: int
    axes: tuple[str | None, ...]
    layers: float
    offloaded: bool = False
    repeated: bool = False


@attrs.frozen(kw_only=True, slots=False)
class StepTrace:
    """The work and the activations of a training step, independent of the mesh.

    Attributes:
        executed_flops: dtype -> FLOPs on all devices, including recomputation.
        kept: Activations that the forward pass saves for the backward pass, for the whole batch.
        layer: Tagged activations of a layer.
        routed: Input and output rows of a layer's experts, with one activation for each width. Empty without experts.
    """

    executed_flops: Mapping[str, float]
    kept: tuple[Activation, ...]
    layer: tuple[Activation, ...]
    routed: tuple[Activation, ...] = ()

    def scale(self, factor: float) -> "StepTrace":
        """Scale the trace to a batch that has `factor` times as many rows."""
        if factor == 1:
            return self

        def scale_rows(activations: tuple[Activation, ...]) -> tuple[Activation, ...]:
            return tuple(attrs.evolve(a, shape=(round(a.shape[0] * factor), *a.shape[1:])) for a in activations)

        executed = {dtype: flops * factor for dtype, flops in self.executed_flops.items()}
        activations = {
            "kept": scale_rows(self.kept),
            "layer": scale_rows(self.layer),
            "routed": scale_rows(self.routed),
        }
        return attrs.evolve(self, executed_flops=executed, **activations)

    @property
    def has_grouped_matmuls(self) -> bool:
        """True if the step has grouped matmuls (experts)."""
        return bool(self.routed)

    @cached_property
    def stream(self) -> tuple[Activation, ...]:
        """Residual stream at the input of each layer. Empty if no layer saves it on the device."""
        return tuple(a for a in self.kept if a.axes == STREAM and not a.offloaded)[:1]

    @cached_property
    def distinct(self) -> tuple[Activation, ...]:
        """Saved activations without duplicates, which XLA merges if JAX does not round the saved values."""
        return tuple(a for a in self.kept if not a.repeated)

    @cached_property
    def tagged_activations(self) -> tuple[Activation, ...]:
        """The residual stream and all tagged activations."""
        return (*self.stream, *self.layer)

    @cached_property
    def hidden(self) -> tuple[Activation, ...]:
        """Largest activation between the matmuls of a layer's feed-forward network. Empty if no activation matches."""
        return _largest(a for a in (*self.layer, *self.routed) if a.axes in (HIDDEN, ROUTED_HIDDEN))

    @cached_property
    def heads(self) -> tuple[Activation, ...]:
        """Largest activation that has an axis of attention heads. Empty if no activation matches."""
        return _largest(a for a in self.layer if a.axes == HEADS)

    @cached_property
    def routed_stream(self) -> tuple[Activation, ...]:
        """Residual stream at the input of experts, with one row per chosen expert. Empty without experts."""
        return tuple(a for a in self.routed if a.axes == ROUTED)

    @property
    def flops(self) -> float:
        """Total FLOPs across all dtypes."""
        return sum(self.executed_flops.values())


def single_device_config(config: Node[Any]) -> Node[Any]:
    """Return the config for a single device without microbatches. A scan over the layers exposes the saved activations."""
    edits: dict[str, Any] = {"mesh.shape": {"fsdp": 1}}
    if accumulate_steps(config) != 1:
        edits["learner.accumulate_steps"] = 1
    for path, stack in find(config, StackRole).items():
        if stack.mode == "unrolled":
            edits[f"{path}.mode"] = "scan"
    return patch(config, edits)


def single_device_program(config: Node[Any], machine: Machine) -> Program:
    """Compose the single-device config with the machine's kernels.

    The device is a CPU because the program is only traced.
    """
    single = attrs.evolve(machine, chips=1, domains=1, chips_per_host=1)
    return compose(single_device_config(config), jax.devices("cpu")[:1], machine=single)  # type: ignore[arg-type]


def trace_step(program: Program, batch: Mapping[str, Any]) -> StepTrace:
    """Trace the training step of a program on one device."""
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
        _, carries = loop_carries(scan, body)
        carried = [v.aval.shape for v in body.outvars[:carries] if v.aval.ndim == 3]
        length, width = (max((shape[axis] for shape in carried), default=0) for axis in (1, 2))
        count = times * scan.params["length"]
        stacked = body.outvars[carries:]
        saved += _activations(stacked, rows, length, width, count, repeated_outputs(stacked, body.eqns))
        layer += _activations([v for e in _names(body) for v in e.outvars], rows, length, width, count)
    products = [scope.op for scope in selection.scopes if scope.op.name == "grouped_matmul"]
    return StepTrace(
        executed_flops=executed, kept=tuple(saved), layer=tuple(layer), routed=tuple(_routed(products, saved))
    )


def _routed(products: Sequence[Any], saved: Sequence[Activation]) -> Iterator[Activation]:
    """Yield one activation for each row width of the grouped matmuls."""
    widths = {a.shape[-1] for a in saved if a.axes == STREAM}
    layers = max((a.layers for a in saved), default=1.0)
    shapes = {
        (op.lhs.shape[0], n): op.lhs.dtype.itemsize for op in products for n in (op.lhs.shape[1], op.rhs.shape[2])
    }
    for shape, itemsize in sorted(shapes.items()):
        axes = ROUTED if shape[1] in widths else ROUTED_HIDDEN
        yield Activation(shape=shape, itemsize=itemsize, axes=axes, layers=layers)


def _largest(activations: Iterable[Activation]) -> tuple[Activation, ...]:
    """Return the activation with the most bytes, as a tuple. Empty if no activation matches."""
    return tuple(sorted(activations, key=lambda a: math.prod(a.shape) * a.itemsize)[-1:])


def _stacks(jaxpr: Any, times: float) -> Iterator[tuple[Any, float]]:
    """Yield the forward scans over layers, recognized by their tags, and the number of times that each runs."""
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
    """Return the stacked outputs of a loop body that repeat the values of an earlier output."""
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
    """Guess the logical axes of an activation from its shape.

    Args:
        shape: Shape, with the batch dimension first.
        length: Length of the sequence.
        width: Width of the residual stream.
    """
    if len(shape) == 4:
        return HEADS
    if len(shape) == 3 and shape[1] != length:
        return STATISTICS
    if len(shape) == 3:
        return STREAM if shape[2] == width else HIDDEN
    return ("batch", *(None,) * (len(shape) - 1))
