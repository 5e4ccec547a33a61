"""`Layer`: an `nnx.Module` that is built from a config node. Also `Precision` and `Context`, which layers share.

Shapes: B batch, S positions, D width, N query heads, K key-value heads, H head size, F hidden size, V vocabulary.

Conventions for layers: a parent knows the arguments and results of its child and offers dimensions to `build`, but never
reads the child's settings. A trained parameter is an `nnx.Param` with a logical name for each axis. See `nn.randomness` for
random numbers and `nn.variables` for other state. Broadcasting never adds dimensions implicitly.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.errors import Problem, RequestError, nearest
from axlearn_core.nn.initializers import Initializer
from axlearn_core.nn.module_checks import check_part

T_co = TypeVar("T_co", covariant=True)

DTYPES = ("float32", "bfloat16", "float16", "float64")


@attrs.frozen
class Precision:
    """Dtypes of a layer: the dtype of its parameters, and the dtype of its computation and results."""

    params: str = "float32"
    compute: str = "float32"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Facts about the rows of a batch that a decoder passes to all its layers.

    Attributes:
        positions: int32 [B or 1, S], position within the document. None means 0, 1, 2, ...
        segment_ids: int32 [B, S], equal within a document and 0 for padding. None means one document per row.
        prefix: int32 [B], length of the prefix of each row that attends in both directions. None means causal attention.
        slots: int32 [B or 1, S], cache slots of the tokens. None if there is no cache.
        real: bool [B, S], False for padding. None means that `segment_ids` marks the padding.
        extras: The batch's other entries by name, [B, ...] each. Use `extra` to read one.
        layer_inputs: An input per layer by name, such as per-layer embeddings. A decoder or its caller sets arrays [B, L, ...] for
            L layers, and each layer sees its own part, [B, ...].
        shared: Values that earlier layers of the stack shared with later ones. Use `share` and `read_shared`.
    """

    positions: jax.Array | None = None
    segment_ids: jax.Array | None = None
    prefix: jax.Array | None = None
    slots: jax.Array | None = None
    real: jax.Array | None = None
    extras: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    layer_inputs: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)

    def tokens(self) -> jax.Array | None:
        """Return a bool mask [B, S] that is False for padding, or None if all positions are tokens."""
        if self.real is not None or self.segment_ids is None:
            return self.real
        return self.segment_ids > 0

    def extra(self, name: str) -> jax.Array:
        """Return another entry of the batch.

        Raises:
            RequestError: The batch has no such entry.
        """
        return _look_up(self.extras, name, "the batch has no entry", "add the entry to the batch, or remove the layer")

    def share(self, name: str, value: Any) -> None:
        """Share a value with the later layers of the stack: an array, or a tree of arrays such as keys and values.

        Layers that share a value under the same name must share equal shapes. Gradients flow through shared values.
        """
        self.shared[name] = value

    def read_shared(self, name: str) -> Any:
        """Return the value that an earlier layer of the stack shared most recently.

        Raises:
            RequestError: No earlier layer shares a value with this name.
        """
        fix = "put a layer that calls `share` before this layer"
        return _look_up(self.shared, name, "no earlier layer shares", fix)


def _look_up(values: Mapping[str, Any], name: str, failure: str, fix: str) -> Any:
    if name in values:
        return values[name]
    raise RequestError(f"{failure} {name!r}\n    expected: one of {sorted(values)}\n    fix: {fix}")


class Layer(Configurable, nnx.Module):
    """Base class for layers.

    The constructor's arguments are the config and the parent's `rngs` and `precision`. A subclass declares the additional
    arguments that it needs from its parent.
    """

    @node
    class Config(Configurable.Config[T_co]):
        """Dtypes of this layer and its children. None inherits the dtypes of the parent."""

        param_dtype: str | None = setting(default=None, kind="precision")
        dtype: str | None = setting(default=None, kind="precision")

        def validate(self) -> Iterable[Problem]:
            """Report unknown dtypes."""
            for name, value in attrs.asdict(self, recurse=False).items():
                if name.endswith("dtype") and isinstance(value, str) and value not in DTYPES:
                    yield Problem(
                        path=name,
                        message=f"unknown dtype {value!r}",
                        expected=f"one of {', '.join(DTYPES)}",
                        nearest=nearest(value, DTYPES),
                    )

    def __init__(self, cfg: Config[Any], *, precision: Precision):
        self.cfg: Any = cfg
        self.precision = Precision(cfg.param_dtype or precision.params, cfg.dtype or precision.compute)

    def __repr__(self) -> str:
        """Return one line. In a notebook, `nnx.display` shows the whole layer."""
        children = [
            f"{name}: {type(child).__name__}" for name, child in vars(self).items() if isinstance(child, nnx.Module)
        ]
        arrays = [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(self, nnx.Param))]
        size = sum(math.prod(array.shape) for array in arrays)
        return f"{type(self).__name__}({', '.join([*children, f'{size:,} parameters'])})"

    __str__ = __repr__

    def child(self, cfg: Node[Any], *, rngs: nnx.Rngs, **offered: object) -> Any:
        """Build a child. Offer it this layer's dtypes in addition to the given arguments."""
        return check_part(cfg.build(rngs=rngs, precision=self.precision, **offered), cfg)

    def parameter(
        self,
        rngs: nnx.Rngs,
        init: Node[Initializer],
        shape: Sequence[int],
        axes: Sequence[str | None],
        *,
        fan_in: Sequence[int] = (0,),
        fan_out: Sequence[int] = (-1,),
    ) -> nnx.Param[jax.Array]:
        """Create a parameter. The initializer scales by the dimensions `fan_in` and `fan_out`.

        In a `shapes_only` block, its value is zero.
        """
        if _SHAPES_ONLY.get():
            zeros = jnp.zeros(shape, self.precision.params)
            return nnx.Param(zeros, out_sharding=tuple(axes), eager_sharding=False)
        value = init.build(axes=tuple(axes))(
            rngs.params(),
            tuple(shape),
            jnp.dtype(self.precision.params),
            in_axis=tuple(fan_in),
            out_axis=tuple(fan_out),
        )
        return nnx.Param(value, out_sharding=tuple(axes), eager_sharding=False)

    def computed(self, parameter: nnx.Param[jax.Array]) -> jax.Array:
        """Return the parameter in the compute dtype."""
        return parameter[...].astype(self.precision.compute)


_SHAPES_ONLY: contextvars.ContextVar[bool] = contextvars.ContextVar("axlearn_shapes_only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Skip initializers, for code that only needs shapes. Tracing them takes about a third of a build."""
    token = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(token)


def expand_to(vector: jax.Array, rank: int) -> jax.Array:
    """Add leading axes of size 1 to a vector, for broadcasting with an array of `rank` dimensions."""
    return jax.lax.expand_dims(vector, range(rank - vector.ndim))
