"""Device meshes, and shardings from logical axes."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axlearn_core.contracts.mesh import DEFAULT_RULES, MESH_AXES, Mesh
from axlearn_core.errors import ConfigError, Problem, counted, nearest

_KEYS = (jax.tree_util.DictKey, jax.tree_util.FlattenedIndexKey)


def make_mesh(config: Mesh, devices: Sequence[Any] | None = None, domains: int = 1) -> jax.sharding.Mesh:
    """Create the device mesh that a config describes.

    On TPUs, neighbors on a mesh axis are physical neighbors if the topology allows it. If there are several domains, only
    the outermost axes span them.

    Args:
        config: Mesh config.
        devices: Devices to use (default: all).
        domains: Number of device groups with fast internal links.

    Raises:
        ConfigError: If the shape does not match the number of devices or domains.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    shape = [sizes[a] for a in MESH_AXES]
    grid = (
        _arrange_tpus(shape, devices, domains) if devices[0].platform == "tpu" else np.asarray(devices).reshape(shape)
    )
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _arrange_tpus(shape: Sequence[int], devices: Sequence[Any], domains: int) -> np.ndarray:
    across, remainder = [], domains
    for size in shape:
        across.append(math.gcd(size, remainder))
        remainder //= across[-1]
    if remainder > 1:
        raise ConfigError(
            Problem(
                path="mesh.shape",
                message="no mesh axis can span the slices",
                got=str({a: n for a, n in zip(MESH_AXES, shape, strict=True) if n > 1}),
                expected=f"outer axes whose sizes have a product that is a multiple of {domains}",
            )
        )
    within = [n // m for n, m in zip(shape, across, strict=True)]
    if domains == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


class Layout:
    """Resolves logical axes on a mesh."""

    def __init__(self, mesh: Any, config: Mesh):
        self.mesh = mesh
        self.rules: Mapping[str, tuple[str, ...]] = {**DEFAULT_RULES, **config.rules}
        for axis, size in mesh.shape.items():
            if size > 1 and not any(axis in axes for axes in self.rules.values()):
                message = "no mesh rule uses this axis, so all its devices would do the same work"
                fix = "remove the axis, or add a feature that uses it (`--with pipeline:microbatches=8`)"
                raise ConfigError(
                    Problem(path=f"mesh.shape.{axis}", message=message, got=counted(size, "device"), fix=fix)
                )

    def spec(self, axes: Sequence[str | None], shape: Sequence[int], path: str) -> PartitionSpec:
        """Return the partition spec for an array. A mesh axis shards only the first dimension that requests it.

        Raises:
            ConfigError: If a logical axis has no rule, or if a dimension is not divisible by its mesh axes.
        """
        used: set[str] = set()
        parts: list[tuple[str, ...] | str | None] = []
        for dim, axis in enumerate(axes):
            if axis is not None and axis not in self.rules:
                raise ConfigError(
                    Problem(
                        path=path,
                        message=f"no mesh rule covers the logical axis {axis!r}",
                        nearest=nearest(axis, self.rules),
                        fix=f"add it: --set mesh.rules.{axis}=[]",
                    )
                )
            mesh_axes = [a for a in self.rules.get(axis or "", ()) if a not in used and self.mesh.shape[a] > 1]
            count = self._count_devices(mesh_axes)
            if shape[dim] % count:
                raise ConfigError(
                    Problem(
                        path=path,
                        message=f"dimension {dim} ({axis}) is not divisible by the mesh axes {', '.join(mesh_axes)}",
                        got=f"{shape[dim]} over {counted(count, 'device')}",
                        fix=self._indivisible_fix(axis, axes, shape[dim], used),
                    )
                )
            used.update(mesh_axes)
            parts.append(None if not mesh_axes else mesh_axes[0] if len(mesh_axes) == 1 else tuple(mesh_axes))
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    def _count_devices(self, mesh_axes: Iterable[str]) -> int:
        return math.prod(self.mesh.shape[a] for a in mesh_axes)

    def _indivisible_fix(self, axis: str | None, axes: Sequence[str | None], size: int, used: Collection[str]) -> str:
        """Suggest a fix for a dimension that is not divisible by its mesh axes.

        Args:
            axis: Logical axis of the dimension.
            axes: Logical axes of the array.
            size: Size of the dimension.
            used: Mesh axes that shard an earlier dimension of the array.
        """
        rule = self.rules.get(axis or "", ())
        prefixes = [rule[:length] for length in range(len(rule), -1, -1)]
        counts = [self._count_devices(a for a in prefix if a not in used) for prefix in prefixes]
        if axis == "batch" and "sequence" in axes:
            positions = counts[0] // math.gcd(size, counts[0])
            split = f"--with context-parallel --set 'mesh.shape={{seq: {positions}, fsdp: -1}}'"
            return f"set input.batch_size to a multiple of {counts[0]}, or shard the positions of each row: {split}"
        shorter_rule = next(prefix for prefix, count in zip(prefixes, counts, strict=True) if size % count == 0)
        effect = "shard this axis over fewer devices" if shorter_rule else "leave this axis unsharded"
        return f"change mesh.shape, or use --set mesh.rules.{axis}=[{','.join(shorter_rule)}] to {effect}"

    def sharding(self, axes: Sequence[str | None], shape: Sequence[int], path: str) -> NamedSharding:
        """Return the sharding of an array; see `spec`."""
        return NamedSharding(self.mesh, self.spec(axes, shape, path))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place_like(self, tree: Any, shardings: Mapping[str, NamedSharding], shapes: Mapping[str, Any]) -> Any:
        """Shard optimizer state like the parameters.

        A leaf with the name and shape of a parameter, such as a moment or a moving average, gets the parameter's sharding.
        Other leaves, such as counters, are replicated.

        Args:
            tree: Tree of abstract arrays.
            shardings: Shardings of parameters keyed by path.
            shapes: Abstract parameters keyed by path.
        """

        def place(path: Any, leaf: Any) -> NamedSharding:
            for entry in reversed(path):
                name = str(entry.key) if isinstance(entry, _KEYS) else ""
                if name in shardings and tuple(shapes[name].shape) == tuple(leaf.shape):
                    return shardings[name]
            return self.replicated

        return jax.tree_util.tree_map_with_path(place, tree)
