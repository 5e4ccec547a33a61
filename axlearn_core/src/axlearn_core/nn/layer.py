"""`Layer`: an `nnx.Module` that is built from a config node. Also what layers hand to one another.

Legend of shapes: B batch, S positions, D width, N query heads, K key-value heads, H head size, F hidden size, V
vocabulary.

Rules that every layer keeps: a parent knows its child's arguments and results, and offers generously at `build`; it
never reads a child's settings. What is trained is `nnx.Param` with a logical name for each axis; `nn.randomness` and
`nn.variables` say what holds for random numbers and other state. Ranks are never promoted implicitly.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import attrs
import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.errors import Problem, nearest
from axlearn_core.nn.held import check_part
from axlearn_core.nn.initializers import Initializer

T_co = TypeVar("T_co", covariant=True)

DTYPES = ("float32", "bfloat16", "float16", "float64")


@attrs.frozen
class Precision:
    """The dtypes of a layer: of its parameters, and of what it computes and returns."""

    params: str = "float32"
    compute: str = "float32"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a decoder tells all its layers about the rows of this call; a layer takes what it needs.

    Attributes:
        positions: int32 [B or 1, S], position within the document; None means 0, 1, 2, ...
        segment_ids: int32 [B, S], equal within a document, 0 for padding; None means that each row is one.
        prefix: int32 [B], how many leading tokens of each row see one another in both directions; None means none.
        slots: int32 [B or 1, S], where in the cache the tokens go; None without a cache.
        real: bool [B, S], False for padding; None means that the segment ids say it.
    """

    positions: jax.Array | None = None
    segment_ids: jax.Array | None = None
    prefix: jax.Array | None = None
    slots: jax.Array | None = None
    real: jax.Array | None = None

    def tokens(self) -> jax.Array | None:
        """bool [B, S], False for padding; None if nothing says so, and all positions count."""
        if self.real is not None or self.segment_ids is None:
            return self.real
        return self.segment_ids > 0


class Layer(Configurable, nnx.Module):
    """The base of the layers.

    Its constructor takes the config and, of what the parent offers, `rngs` and `precision`; a subclass declares what
    else it takes.
    """

    @node
    class Config(Configurable.Config[T_co]):
        """The dtypes of this layer and everything in it; None takes the parent's."""

        param_dtype: str | None = setting(default=None, kind="precision")
        dtype: str | None = setting(default=None, kind="precision")

        def validate(self) -> Iterable[Problem]:
            """Dtypes that do not exist."""
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

    def child(self, cfg: Node[Any], *, rngs: nnx.Rngs, **offered: object) -> Any:
        """Builds a child, offering it this layer's dtypes in addition to what is given."""
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
        """A new parameter; `fan_in` and `fan_out` are the dimensions that its initialiser scales by."""
        value = init.build()(
            rngs.params(),
            tuple(shape),
            jnp.dtype(self.precision.params),
            in_axis=tuple(fan_in),
            out_axis=tuple(fan_out),
        )
        return nnx.Param(value, out_sharding=tuple(axes), eager_sharding=False)

    def computed(self, parameter: nnx.Param[jax.Array]) -> jax.Array:
        """The parameter in the compute dtype."""
        return parameter[...].astype(self.precision.compute)


def expand_to(vector: jax.Array, rank: int) -> jax.Array:
    """`vector` with leading axes of size 1, so that it multiplies an array of `rank` dimensions."""
    return jax.lax.expand_dims(vector, range(rank - vector.ndim))
