"""Enumerate the legal layouts on a machine: meshes, rematerialization, microbatches and offloading."""

import itertools
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
from axlearn_core.plugins.request import format_value
from axlearn_plugins_plan.search.pipelines import Pipeline
from axlearn_plugins_plan.tags import Tag

MAX_MICROBATCHES = 32
VARIED = ("batch", "optimizer-precision")
"""Parts of a layout that change what the model computes. They are varied only with `--vary`."""


@attrs.frozen(kw_only=True)
class MeshChoice:
    """A mesh, and the sharding of the residual stream on it.

    Attributes:
        shape: Axis -> size, without axes of size 1.
        stream: Logical axis (`activation_embed`, `residual_sequence`) -> mesh axes. Contains only rules that differ from the
            base config.
        requested: Whether the request already sets the shape. If so, the layout must not set it again.
    """

    shape: Mapping[str, int]
    stream: Mapping[str, tuple[str, ...]] = {}
    requested: bool = False


@attrs.frozen(kw_only=True)
class Choice:
    """A layout, as changes to the request. None keeps the request's value.

    Attributes:
        mesh: The mesh.
        remat: Value of `--with` for rematerialization.
        microbatches: Microbatches per step.
        offload_optimizer: Whether the optimizer state is in host memory.
        batch: Rows per step.
        optimizer_dtype: Dtype of the optimizer state.
        pipeline: Pipeline schedule of a mesh with stages.
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
        """True if the layout is the unchanged request with its shipped mesh rule."""
        return self == Choice()

    @property
    def features(self) -> tuple[str, ...]:
        """Values of `--with`."""
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
        """Config path -> value, for `--set`."""
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
        """Options for the command line."""
        with_ = [w for text in self.features for w in ("--with", text)]
        set_ = [w for path, value in self.settings.items() for w in ("--set", f"{path}={format_value(value)}")]
        return (*with_, *set_)


def meshes(program: Program, config: Any, machine: Machine, free: Sequence[str]) -> list[MeshChoice]:
    """Return all meshes on the machine that can shard every parameter, in a fixed order.

    Args:
        program: Program of the config, for the logical axes of its parameters.
        config: The experiment with its mesh rule, which sets the sizes of all other axes.
        machine: The machine, with its devices and domains.
        free: Mesh axes whose sizes may change.
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
        for tail in _factors(number // first, count - 1):
            yield (first, *tail)


def _crosses(shape: Mapping[str, int], machine: Machine) -> bool:
    """Return whether only outer axes cross TPU slices."""
    if machine.target.platform != "tpu":
        return True
    domains = machine.domains
    for size in shape.values():
        domains //= math.gcd(size, domains)
    return domains == 1


def _fits_torus(shape: Mapping[str, int], machine: Machine, devices: Sequence[Any]) -> bool:
    """Return whether JAX can build the mesh on the TPU slices."""
    try:
        make_mesh(Mesh(shape=shape), devices, machine.domains)
    except (ConfigError, NotImplementedError, ValueError):
        return False
    return True


def _streams(tensor: int, mesh: Mesh) -> list[Mapping[str, tuple[str, ...]]]:
    """Return the shardings of the residual stream to try.

    These are the base config's sharding and, with tensor parallelism, the alternative (replicated or sharded by width).
    """
    if tensor == 1:
        return [{}]
    sharded = "tensor" in mesh.rules.get("activation_embed", ())
    alternative = () if sharded else ("tensor",)
    return [{}, {"activation_embed": alternative}]


def abstract_layout(mesh: Mesh, shape: Mapping[str, int], stream: Mapping[str, tuple[str, ...]]) -> Layout:
    """Build the layout on a mesh without devices. Raise `ConfigError` if the shape is invalid."""
    config = patch(mesh, {"shape": dict(shape), "rules": {**mesh.rules, **stream}})
    sizes = {a: shape.get(a, 1) for a in MESH_AXES}
    return Layout(jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)), config)


def _legal(program: Program, mesh: Mesh, shape: Mapping[str, int], stream: Mapping[str, tuple[str, ...]]) -> bool:
    try:
        layout = abstract_layout(mesh, shape, stream)
        axes = {**program.trained.axes, **program.trained.variable_axes}
        for path, array in {**program.trained.abstract, **program.trained.variables}.items():
            layout.spec(axes[path], array.shape, path)
    except ConfigError:
        return False
    return True


def microbatches(rows: int, shards: int) -> list[int]:
    """Return the microbatch counts (powers of two) that give each of `shards` devices the same number of rows."""
    powers = itertools.takewhile(lambda n: n <= MAX_MICROBATCHES, (2**i for i in itertools.count()))
    return [n for n in powers if rows % (n * shards) == 0]


def remat_options(tags: Sequence[Tag], offload: bool = False) -> list[str]:
    """Return the rematerialization options to try, in the form that `--with` accepts.

    They range from saving only the inputs of layers to saving every tag in `GROUPS`. Projections that are computed together are
    saved together. The options are each group alone, the prefixes of the groups sorted by saved FLOPs per byte, and each prefix
    without one group. With `offload`, each prefix is also offloaded to host memory. The caller drops an option if a different
    option saves as much memory but recomputes less.
    """
    sizes = {t.name: (t.flops, max(t.bytes, 1.0)) for t in tags}
    if "attention_residuals" in sizes:  # the residuals of the attention kernel, which include the context
        sizes.pop("context", None)
    groups = [tuple(t for t in group if t in sizes) for group in GROUPS]
    groups = [g for g in groups if g]

    def worth(group: tuple[str, ...]) -> float:
        return sum(sizes[t][0] for t in group) / sum(sizes[t][1] for t in group)

    groups.sort(key=lambda g: (-worth(g), g))
    chains = [groups[:n] for n in range(1, len(groups) + 1)]
    subsets = [*chains, *([g] for g in groups), *([o for o in chain if o != g] for chain in chains for g in chain)]
    options = ["remat:policy=full", *(f"remat:save=[{_list_tags(s)}]" for s in subsets if s)]
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
"""Groups of activation tags that are worth saving together. The backward pass does not need `mlp_out`."""
