"""The layouts that are legal on a machine: meshes, what the backward pass keeps, microbatches, where the optimizer's state is."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program
from axlearn_core.compose.devices import topology_devices
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import MESH_AXES, Mesh
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError
from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.tags import Tag

MOST_MICROBATCHES = 32
VARIED = ("batch", "optimizer-precision")
"""What changes the mathematics, and is searched only when asked for."""


@attrs.frozen(kw_only=True)
class MeshChoice:
    """A mesh, and how the residual stream lies on it.

    Attributes:
        shape: axis -> size, axes of one device left out.
        stream: mesh axes of the logical axes `activation_embed` and `residual_sequence` where they are not as in the base.
        requested: whether the request sets the shape, which then is not set a second time.
    """

    shape: Mapping[str, int]
    stream: Mapping[str, tuple[str, ...]] = {}
    requested: bool = False


@attrs.frozen(kw_only=True)
class Choice:
    """One layout, as the words of the command line that make it.

    Attributes:
        mesh: the mesh; None keeps what the request says.
        remat: the option of `--with` for rematerialisation; None keeps it.
        microbatches: of a step; None keeps it.
        offload_optimizer: whether the optimizer's state waits in the host's memory.
        batch: rows of a step; None keeps it.
        optimizer_dtype: of the optimizer's state; None keeps it.
        pipeline: the schedule of a mesh with stages; None keeps it.
    """

    mesh: MeshChoice | None = None
    remat: str | None = None
    microbatches: int | None = None
    offload_optimizer: bool = False
    batch: int | None = None
    optimizer_dtype: str | None = None
    pipeline: Pipeline | None = None

    @property
    def shipped(self) -> bool:
        """Whether it is the request as it is, with the mesh rule that ships."""
        return self == Choice()

    @property
    def features(self) -> tuple[str, ...]:
        """For `--with`."""
        words = [self.remat] if self.remat is not None else []
        if self.microbatches is not None:
            words.append(f"gradient-accumulation:steps={self.microbatches}")
        if self.offload_optimizer:
            words.append("offload-optimizer")
        if self.optimizer_dtype is not None:
            words.append(f"optimizer-precision:dtype={self.optimizer_dtype}")
        if self.pipeline is not None:
            words.append(self.pipeline.feature)
        return tuple(words)

    @property
    def settings(self) -> dict[str, Any]:
        """For `--set`."""
        values: dict[str, Any] = {}
        if self.mesh is not None:
            if not self.mesh.requested:
                values["mesh.shape"] = dict(self.mesh.shape)
            for axis, mesh_axes in self.mesh.stream.items():
                values[f"mesh.rules.{axis}"] = list(mesh_axes)
        if self.batch is not None:
            values["input.batch_size"] = self.batch
        return values

    @property
    def words(self) -> tuple[str, ...]:
        """Of the command line."""
        with_ = [w for text in self.features for w in ("--with", text)]
        set_ = [w for path, value in self.settings.items() for w in ("--set", f"{path}={written(value)}")]
        return (*with_, *set_)


def written(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def meshes(program: Program, config: Any, machine: Machine, free: Sequence[str]) -> list[MeshChoice]:
    """Every mesh of the machine's devices on which all parameters can be laid, in a fixed order.

    Args:
        program: of the config, for the logical axes of its parameters.
        config: the experiment with its mesh rule; axes that are not free stay as it has them.
        machine: how many devices there are, in which domains.
        free: the axes whose sizes may change.
    """
    on_torus = topology_devices(machine) if machine.target.platform == "tpu" else None
    sizes = config.mesh.sizes(machine.devices)
    fixed = {a: n for a, n in sizes.items() if a not in free}
    devices = machine.devices // math.prod(fixed.values())
    result = []
    for numbers in _factors(devices, len(free)):
        shape = {**fixed, **dict(zip(free, numbers, strict=True))}
        shape = {a: shape.get(a, 1) for a in MESH_AXES}
        if shape["tensor"] * shape["seq"] > machine.devices_per_domain or not _crosses(shape, machine):
            continue
        small = {a: n for a, n in shape.items() if n > 1} or {"fsdp": 1}
        if on_torus is not None and not _fits_torus(small, machine, on_torus):
            continue
        for stream in _streams(shape["tensor"], config.mesh):
            if _legal(program, config.mesh, small, stream):
                result.append(MeshChoice(shape=small, stream=stream))
    return result


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        for rest in _factors(number // first, count - 1):
            yield (first, *rest)


def _crosses(shape: Mapping[str, int], machine: Machine) -> bool:
    """Whether the outer axes alone go across the slices of a TPU."""
    if machine.target.platform != "tpu":
        return True
    domains = machine.domains
    for size in shape.values():
        domains //= math.gcd(size, domains)
    return domains == 1


def _fits_torus(shape: Mapping[str, int], machine: Machine, devices: Sequence[Any]) -> bool:
    """Whether the mesh can be laid over the slices of a TPU."""
    try:
        make_mesh(Mesh(shape=shape), devices, machine.domains)
    except (ConfigError, NotImplementedError, ValueError):
        return False
    return True


def _streams(tensor: int, mesh: Mesh) -> list[Mapping[str, tuple[str, ...]]]:
    """The ways to lay the residual stream: as the base has it, and with tensor parallelism also whole and split by width."""
    if tensor == 1:
        return [{}]
    by_width = "tensor" in mesh.rules.get("activation_embed", ())
    other = () if by_width else ("tensor",)
    return [{}, {"activation_embed": other}]


def laid(mesh: Mesh, shape: Mapping[str, int], stream: Mapping[str, tuple[str, ...]]) -> Layout:
    """The logical axes on a mesh without devices; raises `ConfigError` where the shape is wrong."""
    config = patch(mesh, {"shape": dict(shape), "rules": {**mesh.rules, **stream}})
    sizes = {a: shape.get(a, 1) for a in MESH_AXES}
    return Layout(jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)), config)


def _legal(program: Program, mesh: Mesh, shape: Mapping[str, int], stream: Mapping[str, tuple[str, ...]]) -> bool:
    try:
        layout = laid(mesh, shape, stream)
        axes = {**program.trained.axes, **program.trained.variable_axes}
        for path, array in {**program.trained.abstract, **program.trained.variables}.items():
            layout.spec(axes[path], array.shape, path)
    except ConfigError:
        return False
    return True


def microbatches(rows: int, shards: int) -> list[int]:
    """Into how many microbatches so many rows can be cut, each with as many rows for every device."""
    powers = itertools.takewhile(lambda n: n <= MOST_MICROBATCHES, (2**i for i in itertools.count()))
    return [n for n in powers if rows % (n * shards) == 0]


def remat_options(tags: Sequence[Tag], offload: bool = False) -> list[str]:
    """Values of `--with` for rematerialisation, from nothing but the inputs of layers to every tag of the list.

    Projections that are computed together are kept together. There is each group alone, and the groups one after the other,
    those first whose bytes save most FLOPs, whole and without one of them. With `offload` whole ones also in the host's
    memory. Those that keep as much as another and compute more are sorted out by their trace.
    """
    sizes = {t.name: (t.flops, max(t.bytes, 1.0)) for t in tags}
    if "attention_residuals" in sizes:  # what a kernel keeps for its backward pass: the context is among it
        sizes.pop("context", None)
    groups = [tuple(t for t in group if t in sizes) for group in GROUPS]
    groups = [g for g in groups if g]

    def worth(group: tuple[str, ...]) -> float:
        return sum(sizes[t][0] for t in group) / sum(sizes[t][1] for t in group)

    groups.sort(key=lambda g: (-worth(g), g))
    chains = [groups[:n] for n in range(1, len(groups) + 1)]
    sets = [*chains, *([g] for g in groups), *([o for o in chain if o != g] for chain in chains for g in chain)]
    options = ["remat:policy=full", *(f"remat:save=[{_list_tags(s)}]" for s in sets if s)]
    if offload:
        options += [f"remat:offload=[{_list_tags(s)}]" for s in chains]
    return list(dict.fromkeys(options))


def _list_tags(groups: Sequence[Sequence[str]]) -> str:
    order = [t for group in GROUPS for t in group]
    return ",".join(sorted((t for g in groups for t in g), key=order.index))


GROUPS = (
    ("query", "key", "value"),
    ("context", "attention_residuals"),
    ("attention_out",),
    ("mlp_gate", "mlp_up"),
    ("mlp_hidden",),
)
"""Activation tags that are worth keeping, and those that only make sense together. (`mlp_out` is needed by nothing.)"""
