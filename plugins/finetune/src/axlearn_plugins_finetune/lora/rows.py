"""Choose an adapter for each row of a batch, so that one server can serve many fine-tuned models (S-LoRA, Sheng et al., 2023).

All adapters of a map are concatenated into two matrices. Each row is multiplied by all adapters, and a mask selects the result
of its own adapter. This takes two dense matmuls, gathers no matrices, and scales to a few dozen adapters.

Shapes: N adapters, R largest rank.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting, with_subclass
from axlearn_core.config.node import take
from axlearn_core.config.tree import children, join, with_children
from axlearn_core.contracts.capabilities import StacksMaps
from axlearn_core.errors import CheckpointError, RequestError, nearest
from axlearn_core.nn.layer import Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_plugins_finetune.conversion.target_patterns import matching_paths
from axlearn_plugins_finetune.lora.adapters import AdapterExport, load
from axlearn_plugins_finetune.lora.feature import projections
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear, subclass_with

Tree = TypeVar("Tree", bound=Node[Any])

_choice: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("adapter_of_each_row", default=None)


@contextlib.contextmanager
def row_adapters(choice: jax.Array) -> Iterator[None]:
    """Set the adapter of each row while a model is traced.

    Args:
        choice: One-hot rows, float32 [rows, N]. A row of zeros selects the base.
    """
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


class RowLoraLinear(Layer):
    """A linear map with adapters. `row_adapters` selects an adapter for each row; otherwise rows use only the base."""

    @node
    class Config(Layer.Config["RowLoraLinear"]):
        """Config of the base and its adapters, which are initialized to zero.

        Attributes:
            base: Projection of any kind.
            count: Number of adapters (N).
            rank: Largest rank (R).
        """

        input_dims: tuple[int, ...] = interface(default=REQUIRED)
        output_dims: tuple[int, ...] = interface(default=REQUIRED)
        base: Node[Projection] = Linear.Config()
        count: int = setting(default=1, ge=1)
        rank: int = setting(default=16, ge=1)

        def build(self, **offered: Any) -> Any:
            """Build `base` with adapters for rows."""
            cfg, arguments = take(self, offered)
            module = with_subclass(cfg.base, _class_with_rows).build(**offered)
            module.add_rows(cfg, arguments["axes"], arguments["precision"])
            return module


class RowMap:
    """A mixin that adds row adapters to a projection. It precedes the projection's class in the list of bases.

    Attributes:
        rows_a: A of all adapters, [*input_dims, N, R].
        rows_b: B of all adapters, [N, R, *output_dims].
        rows_inputs: Number of input dimensions.
    """

    precision: Precision
    rows_a: Any
    rows_b: Any
    rows_inputs: int

    def add_rows(self, cfg: RowLoraLinear.Config, axes: Sequence[str | None], precision: Precision) -> None:
        """Create zero-initialized adapters for a projection that was built with these axes."""
        count, dtype = len(cfg.input_dims), jnp.dtype(precision.params)
        a, b = (*cfg.input_dims, cfg.count, cfg.rank), (cfg.count, cfg.rank, *cfg.output_dims)
        self.rows_a = nnx.Param(jnp.zeros(a, dtype), out_sharding=(*axes[:count], None, "rank"), eager_sharding=False)
        self.rows_b = nnx.Param(jnp.zeros(b, dtype), out_sharding=(None, "rank", *axes[count:]), eager_sharding=False)
        self.rows_inputs = count

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims].

        Raises:
            RequestError: The number of chosen adapters differs from the number of rows.
        """
        base: Any = super()
        y, choice = base.__call__(x), _choice.get()
        if choice is None:
            return y
        a, b = (p[...].astype(self.precision.compute) for p in (self.rows_a, self.rows_b))
        shape = x.shape[: x.ndim - self.rows_inputs]
        if math.prod(shape) != choice.shape[0]:
            raise RequestError(
                f"adapters are chosen for {choice.shape[0]} rows, but the input has the rows {shape}\n"
                "    fix: remove the adapters of maps with other rows, such as those of experts"
            )
        mask = jnp.repeat(choice.astype(a.dtype), a.shape[-1], axis=1)
        inner = math.prod(a.shape[:-2])
        low = (x.astype(a.dtype).reshape(-1, inner) @ a.reshape(inner, -1)) * mask
        update = low @ b.reshape(low.shape[1], -1)
        return y + update.reshape(y.shape).astype(y.dtype)


class GroupedRowMap(RowMap):
    """Row adapters for a projection that supports stacks of maps. Calls with a stack raise an error."""

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """Raise `RequestError`."""
        raise RequestError(
            "adapters of experts cannot be chosen by row, because experts sort their rows\n"
            "    fix: serve these adapters merged into their base"
        )


@cache  # one class per kind of base, so that equal modules compare equal
def _class_with_rows(kind: type) -> type:
    return subclass_with(GroupedRowMap if issubclass(kind, StacksMaps) else RowMap, kind, "WithRows")


@attrs.frozen
class FreeSlots:
    """Room for adapters that are added after the model was built.

    Attributes:
        count: Maximum number of these adapters.
        rank: Their largest rank.
        targets: Patterns of the paths of linear maps that they may adapt.
    """

    count: int = 0
    rank: int = 16
    targets: tuple[str, ...] = ("**.attention.*",)


@attrs.frozen(eq=False)
class RowAdapters:
    """Exported adapters by name, for one model.

    Attributes:
        exported: Name -> adapters, in the order of a choice's columns.
        free: Room for other adapters, in the columns after them.
    """

    exported: Mapping[str, AdapterExport]
    free: FreeSlots = FreeSlots()

    @classmethod
    def read(cls, directories: Mapping[str, str], free: FreeSlots = FreeSlots()) -> "RowAdapters":
        """Read adapters from directories that `axlearn lora export` wrote.

        Args:
            directories: Name of an adapter -> directory.
            free: Room for other adapters.

        Raises:
            CheckpointError: A directory has no adapters.
            RequestError: The adapters cannot be chosen per row.
        """
        return cls({name: read_export(name, directory) for name, directory in directories.items()}, free)

    @property
    def rank(self) -> int:
        """Largest rank among all adapters (R)."""
        ranks = [rank_of(x) for x in self.exported.values()]
        return max([*ranks, self.free.rank] if self.free.count else ranks)

    def apply(self, model: Tree) -> Tree:
        """Return the config of a model with adapters for rows.

        Raises:
            RequestError: The model lacks a map that has adapters, or already has adapters.
        """
        maps = dict(projections(model))
        targets = {_config_path(path): name for name, x in self.exported.items() for path in x.scales}
        for path, name in targets.items():
            if path not in maps:
                close = nearest(path, maps)
                raise RequestError(
                    f"adapter {name} was trained on a different base: this model has no linear map {path}\n"
                    + (f"    nearest: {', '.join(close)}\n" if close else "")
                    + "    fix: serve the base that it was trained on"
                )
            if isinstance(maps[path], LoraLinear.Config):
                raise RequestError(
                    f"adapter {name}: the served model already has adapters at {path}\n"
                    "    fix: serve the base, and pass both sets of adapters"
                )
        paths = set(targets)
        if self.free.count:
            paths |= matching_paths(model, self.free.targets, list(maps), subject="the slots of adapters")
        return _replace_maps(model, "", paths, len(self.exported) + self.free.count, self.rank)

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise `RequestError` unless all adapters were trained on these base weights."""
        for name, adapters in self.exported.items():
            try:
                adapters.check(params)
            except RequestError as error:
                raise RequestError(f"adapter {name}: {error}") from error

    def arrays(self, specs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return path -> array for the adapter parameters of a model from `apply`.

        Args:
            specs: Path -> shape and dtype of all parameters of the model.
        """
        return slot_arrays(specs, list(self.exported.values()))


def read_export(name: str, directory: str) -> AdapterExport:
    """Read an adapter from a directory that `axlearn lora export` wrote.

    Raises:
        CheckpointError: The directory has no adapters.
        RequestError: The adapters cannot be chosen per row.
    """
    try:
        exported = load(Path(directory).expanduser())
    except CheckpointError as error:
        raise CheckpointError(f"adapter {name}: {error}") from error
    if moved := sorted(exported.variables):
        raise RequestError(
            f"adapter {name}: training also changed the base's variables, which all rows share\n"
            f"    got: {', '.join(moved[:3])}\n    fix: serve the adapter merged into its base"
        )
    return exported


def rank_of(adapters: AdapterExport) -> int:
    """Return the largest rank of an adapter's maps."""
    return max(adapters.params[f"{path}.lora_a"].shape[-1] for path in adapters.scales)


def check_slot(name: str, adapters: AdapterExport, specs: Mapping[str, Any]) -> None:
    """Raise `RequestError` unless an adapter fits into the slots of a model from `RowAdapters.apply`.

    Args:
        name: Name of the adapter.
        adapters: The adapter.
        specs: Path -> shape and dtype of all parameters of the model.
    """
    try:
        adapters.check_shapes(specs)
    except RequestError as error:
        raise RequestError(f"adapter {name}: {error}") from error
    if missing := sorted(path for path in adapters.scales if f"{path}.rows_a" not in specs):
        raise RequestError(
            f"adapter {name}: the model was built without room for adapters of {', '.join(missing[:3])}\n"
            "    fix: build it with targets that match these maps"
        )
    most = min(specs[f"{path}.rows_a"].shape[-1] for path in adapters.scales)
    if rank_of(adapters) > most:
        raise RequestError(
            f"adapter {name}: the rank is {rank_of(adapters)}\n    expected: at most {most}, the rank that the model was built with"
        )


def slot_arrays(specs: Mapping[str, Any], slots: Sequence[AdapterExport | None]) -> dict[str, np.ndarray]:
    """Return path -> array for the adapter parameters of a model from `RowAdapters.apply`.

    Args:
        specs: Path -> shape and dtype of all parameters of the model.
        slots: Adapter in each column of a choice. None and missing columns are zero.
    """
    arrays = {p: np.zeros(s.shape, s.dtype) for p, s in specs.items() if p.endswith((".rows_a", ".rows_b"))}
    for index, adapters in enumerate(slots):
        if adapters is None:
            continue
        for path, scale in adapters.scales.items():
            a, b = (np.asarray(adapters.params[f"{path}.lora_{side}"], np.float32) for side in "ab")
            rows_a, rows_b = arrays[f"{path}.rows_a"], arrays[f"{path}.rows_b"]
            lead = a.ndim + b.ndim - 2 - specs[f"{path}.weight"].ndim
            rank = a.shape[-1]
            rows_a[..., index, :rank] = a
            rows_b[(slice(None),) * lead + (index, slice(rank))] = scale * b
    return arrays


def _config_path(path: str) -> str:
    """Return the config path of a module path. Mixed layers are numbered in the module path but share a config slot."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def _replace_maps(value: Any, path: str, targets: set[str], count: int, rank: int) -> Any:
    if path in targets:
        return RowLoraLinear.Config(base=value, count=count, rank=rank)
    parts = {k: _replace_maps(v, join(path, k), targets, count, rank) for k, v in children(value).items()}
    return with_children(value, parts)
