"""Adapters chosen for each row of a batch, so that one server answers for many fine-tuned models (as S-LoRA, Sheng et al., 2023).

The adapters of a map stand side by side in two matrices. A product with all of them, whose results count for a row only where
its own adapter made them, takes two dense products and gathers no matrices: it serves up to some dozens of adapters.

N adapters, R their largest rank.
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
from axlearn_plugins_finetune.lora.adapters import Exported, load
from axlearn_plugins_finetune.lora.feature import projections
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear, subclass_with

Tree = TypeVar("Tree", bound=Node[Any])

_choice: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("adapter_of_each_row", default=None)


@contextlib.contextmanager
def row_adapters(choice: jax.Array) -> Iterator[None]:
    """Says which adapter each row takes while a model is traced: float32 [rows, N], one 1 in a row, or none for the base."""
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


class RowLoraLinear(Layer):
    """A linear map with several adapters, one for each row; see `row_adapters`. Outside of it, the base alone."""

    @node
    class Config(Layer.Config["RowLoraLinear"]):
        """The map, and room for its adapters, which starts as zeros.

        Attributes:
            base: a projection of any kind.
            count: N.
            rank: R.
        """

        input_dims: tuple[int, ...] = interface(default=REQUIRED)
        output_dims: tuple[int, ...] = interface(default=REQUIRED)
        base: Node[Projection] = Linear.Config()
        count: int = setting(default=1, ge=1)
        rank: int = setting(default=16, ge=1)

        def build(self, **offered: Any) -> Any:
            """The module of `base`, with the adapters."""
            cfg, rest = take(self, offered)
            module = with_subclass(cfg.base, _class_with_rows).build(**offered)
            module.add_rows(cfg, rest["axes"], rest["precision"])
            return module


class RowMap:
    """What a projection with adapters for rows has in addition to its own class, which comes behind this one.

    rows_a       [*input_dims, N, R]
    rows_b       [N, R, *output_dims]
    rows_inputs  how many input dimensions there are
    """

    precision: Precision
    rows_a: Any
    rows_b: Any
    rows_inputs: int

    def add_rows(self, cfg: RowLoraLinear.Config, axes: Sequence[str | None], precision: Precision) -> None:
        """Makes room for the adapters of a projection that was built with these axes."""
        count, dtype = len(cfg.input_dims), jnp.dtype(precision.params)
        a, b = (*cfg.input_dims, cfg.count, cfg.rank), (cfg.count, cfg.rank, *cfg.output_dims)
        self.rows_a = nnx.Param(jnp.zeros(a, dtype), out_sharding=(*axes[:count], None, "rank"), eager_sharding=False)
        self.rows_b = nnx.Param(jnp.zeros(b, dtype), out_sharding=(None, "rank", *axes[count:]), eager_sharding=False)
        self.rows_inputs = count

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., *input_dims] -> [..., *output_dims].

        Raises:
            RequestError: adapters are chosen for another number of rows.
        """
        base: Any = super()
        y, choice = base.__call__(x), _choice.get()
        if choice is None:
            return y
        a, b = (p[...].astype(self.precision.compute) for p in (self.rows_a, self.rows_b))
        shape = x.shape[: x.ndim - self.rows_inputs]
        if math.prod(shape) != choice.shape[0]:
            raise RequestError(
                f"adapters are chosen for {choice.shape[0]} rows, and {shape} are computed\n"
                "    fix: leave out the adapters of maps that see other rows, such as those of experts"
            )
        each = jnp.repeat(choice.astype(a.dtype), a.shape[-1], axis=1)
        inner = math.prod(a.shape[:-2])
        low = (x.astype(a.dtype).reshape(-1, inner) @ a.reshape(inner, -1)) * each
        update = low @ b.reshape(low.shape[1], -1)
        return y + update.reshape(y.shape).astype(y.dtype)


class GroupedRowMap(RowMap):
    """Of a projection that can be a stack of maps, which cannot have adapters for rows."""

    def grouped(self, x: jax.Array, product: Any) -> jax.Array:
        """Raises `RequestError`."""
        raise RequestError(
            "adapters of experts cannot be chosen by row: rows stand in the order of their experts there\n"
            "    fix: serve such adapters alone, merged into their base"
        )


@cache  # one class for each kind of base, so that equal modules stay equal
def _class_with_rows(kind: type) -> type:
    return subclass_with(GroupedRowMap if issubclass(kind, StacksMaps) else RowMap, kind, "WithRows")


@attrs.frozen(eq=False)
class RowAdapters:
    """Exported adapters by name, for one model.

    Attributes:
        exported: name -> adapters; their order is that of the columns of a choice.
    """

    exported: Mapping[str, Exported]

    @classmethod
    def read(cls, directories: Mapping[str, str]) -> "RowAdapters":
        """The adapters in directories that `axlearn lora export` wrote.

        Raises:
            CheckpointError: a directory holds none.
            RequestError: adapters cannot be chosen by row.
        """
        exported = {}
        for name, directory in directories.items():
            try:
                exported[name] = load(Path(directory).expanduser())
            except CheckpointError as error:
                raise CheckpointError(f"adapter {name}: {error}") from error
            if moved := sorted(exported[name].variables):
                raise RequestError(
                    f"adapter {name}: training moved variables of its base too, which all rows share\n"
                    f"    got: {', '.join(moved[:3])}\n    fix: serve it alone, merged into its base"
                )
        return cls(exported)

    @property
    def rank(self) -> int:
        """R."""
        return max(x.params[f"{path}.lora_a"].shape[-1] for x in self.exported.values() for path in x.scales)

    def apply(self, model: Tree) -> Tree:
        """The config of a model with room for the adapters.

        Raises:
            RequestError: it lacks a map that has adapters, or has adapters of its own.
        """
        maps = dict(projections(model))
        targets = {_config_path(path): name for name, x in self.exported.items() for path in x.scales}
        for path, name in targets.items():
            if path not in maps:
                close = nearest(path, maps)
                raise RequestError(
                    f"adapter {name} is of another base: this model has no linear map {path}\n"
                    + (f"    nearest: {', '.join(close)}\n" if close else "")
                    + "    fix: serve the base that it was trained with"
                )
            if isinstance(maps[path], LoraLinear.Config):
                raise RequestError(
                    f"adapter {name}: the model that is served has adapters of its own at {path}\n"
                    "    fix: serve their base, and give both as adapters"
                )
        return _replace_maps(model, "", set(targets), len(self.exported), self.rank)

    def check(self, params: Mapping[str, Any]) -> None:
        """Raises `RequestError` unless these are the weights that all adapters were trained beside."""
        for name, adapters in self.exported.items():
            try:
                adapters.check(params)
            except RequestError as error:
                raise RequestError(f"adapter {name}: {error}") from error

    def arrays(self, specs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The parameters of a model that `apply` made room in: path -> array. `specs` are all its parameters."""
        arrays = {p: np.zeros(s.shape, s.dtype) for p, s in specs.items() if p.endswith((".rows_a", ".rows_b"))}
        for index, adapters in enumerate(self.exported.values()):
            for path, scale in adapters.scales.items():
                a, b = (np.asarray(adapters.params[f"{path}.lora_{side}"], np.float32) for side in "ab")
                room_a, room_b = arrays[f"{path}.rows_a"], arrays[f"{path}.rows_b"]
                lead = a.ndim + b.ndim - 2 - specs[f"{path}.weight"].ndim
                rank = a.shape[-1]
                room_a[..., index, :rank] = a
                room_b[(slice(None),) * lead + (index, slice(rank))] = scale * b
        return arrays


def _config_path(path: str) -> str:
    """Of a module's path: layers of several kinds are numbered in it, and stand in one slot of the config."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def _replace_maps(value: Any, path: str, targets: set[str], count: int, rank: int) -> Any:
    if path in targets:
        return RowLoraLinear.Config(base=value, count=count, rank=rank)
    parts = {k: _replace_maps(v, join(path, k), targets, count, rank) for k, v in children(value).items()}
    return with_children(value, parts)
