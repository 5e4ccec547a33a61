"""Multi-head and grouped-query attention."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.config import REQUIRED, Node, interface, node, setting
from axlearn_core.errors import Problem, RequestError
from axlearn_core.nn.layer import Context, Layer, Precision
from axlearn_core.nn.linear import Linear, Projection
from axlearn_core.nn.remat import tag
from axlearn_core.nn.sharding import constrain
from axlearn_plugins_transformer.kernels import attention, masks
from axlearn_plugins_transformer.kernels.bias import Bias
from axlearn_plugins_transformer.kv_cache import ContiguousCache, KVCache, build_cache
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole, WindowRole
from axlearn_plugins_transformer.norm import Norm


class PositionEncoding(Protocol):
    """Tells queries and keys where they are. Built with `head_dim`, `num_heads`, `rngs`, `precision`.

    One that also works on the scores, or only on them, is a `ScoreBias`.
    """

    def __call__(self, query: jax.Array, key: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, S, N, H], [B, S, K, H] and int32 [B or 1, S] -> the same shapes."""
        ...


@runtime_checkable
class ScoreBias(Protocol):
    """What a position encoding may be in addition: something that is added to the scores."""

    def score_bias(self) -> Bias:
        """The bias, for `num_heads` query heads."""
        ...


def bias_of(position: Any) -> Bias | None:
    """The bias of a position encoding on the scores; None where it has none."""
    return position.score_bias() if isinstance(position, ScoreBias) else None


def window_of(window: int | Node[int | None] | None) -> int | None:
    """A window, given as a number or as a node: so that layers of one stack can differ in it alone."""
    return window.build() if isinstance(window, Node) else window


def cached_slots(context: Context) -> jax.Array:
    """int32 [B or 1, S], where in the cache the tokens go.

    Raises:
        RequestError: the rows hold several documents each.
    """
    if context.segment_ids is not None:
        raise RequestError("attention with a cache takes rows of one document each: leave out segment_ids")
    slots: Any = context.slots
    return slots


class AttentionLayer(Protocol):
    """Mixes information between positions. Built with `input_dim`, `rngs`, `precision`."""

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """[B, S, D] and its cache -> ([B, S, D], the new cache)."""
        ...

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache."""
        ...


class Attention(Layer):
    """Self-attention, causal by default (Vaswani et al., 2017), grouped-query where `num_kv_heads` is less (Ainslie et al., 2023).

    It has no position encoding unless `position` gives one.
    """

    @node
    class Config(Layer.Config["Attention"], WindowRole, AttentionKernelRole):
        """The heads, and what is optional around them.

        `num_kv_heads` defaults to `num_heads`, `head_dim` to the width over the heads, `scale` to head_dim ** -0.5.
        `qk_norm` is a norm over each head of queries and keys, `softcap` caps the scores, `window` limits how far back
        a query sees, itself included (a node that builds an int or None may stand for it), `kernel` names a kernel of
        the op `attention`, or of the op that `kv_cache` runs. With `causal: false` a query sees what comes after it too:
        for encoders.
        """

        input_dim: int = interface(default=REQUIRED)
        num_heads: int = setting(default=REQUIRED, ge=1, le=2**24)
        num_kv_heads: int | None = setting(default=None, ge=1)
        head_dim: int | None = setting(default=None, ge=1)
        position: Node[PositionEncoding] | None = None
        qk_norm: Node[Norm] | None = None
        scale: float | None = setting(default=None, gt=0)
        softcap: float | None = setting(default=None, gt=0)
        window: int | Node[int | None] | None = setting(default=None, ge=1)
        causal: bool = True
        kernel: str | None = setting(default=None, kind="execution")
        query: Node[Projection] = Linear.Config()
        key: Node[Projection] = Linear.Config()
        value: Node[Projection] = Linear.Config()
        output: Node[Projection] = Linear.Config()
        kv_cache: Node[KVCache] = setting(default=ContiguousCache.Config(), kind="execution")

        def validate(self) -> Iterable[Problem]:
            """Heads that do not divide."""
            yield from super().validate()
            if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
                divisors = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
                yield Problem(
                    path="num_kv_heads",
                    message="does not divide num_heads",
                    got=f"{self.num_kv_heads} of {self.num_heads}",
                    expected=f"one of {', '.join(divisors)}",
                )

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs, precision: Precision):
        super().__init__(cfg, precision=precision)
        width = cfg.input_dim
        if cfg.head_dim is None and width % cfg.num_heads:
            raise RequestError(
                f"attention: num_heads={cfg.num_heads} does not divide the width {width}\n"
                "    fix: set head_dim, or change one"
            )
        self.kv_heads, self.head_dim = cfg.num_kv_heads or cfg.num_heads, cfg.head_dim or width // cfg.num_heads
        many, few = (cfg.num_heads, self.head_dim), (self.kv_heads, self.head_dim)
        into, into_kv, out = ("embed", "heads", "head_dim"), ("embed", "kv", "head_dim"), ("heads", "head_dim", "embed")
        self.query = self.child(cfg.query, rngs=rngs, input_dims=(width,), output_dims=many, axes=into)
        self.key = self.child(cfg.key, rngs=rngs, input_dims=(width,), output_dims=few, axes=into_kv)
        self.value = self.child(cfg.value, rngs=rngs, input_dims=(width,), output_dims=few, axes=into_kv)
        self.output = self.child(cfg.output, rngs=rngs, input_dims=many, output_dims=(width,), axes=out)
        if cfg.qk_norm is not None:
            self.query_norm = self.child(cfg.qk_norm, rngs=rngs, dim=self.head_dim)
            self.key_norm = self.child(cfg.qk_norm, rngs=rngs, dim=self.head_dim)
        if cfg.position is not None:
            self.position = self.child(cfg.position, rngs=rngs, head_dim=self.head_dim, num_heads=cfg.num_heads)

    def init_cache(self, batch: int, length: int) -> Any:
        """An empty cache for `batch` rows of at most `length` tokens."""
        return build_cache(self.cfg.kv_cache).init(batch, length, self.kv_heads, self.head_dim, self.precision.compute)

    def mask(self, context: Context) -> masks.Mask:
        """Which keys a query sees."""
        return masks.visible(context, window_of(self.cfg.window), causal=self.cfg.causal)

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """[B, S, D] and its cache -> ([B, S, D], the new cache)."""
        cfg = self.cfg
        q, k, v = tag(self.query(x), "query"), tag(self.key(x), "key"), tag(self.value(x), "value")
        q = constrain(q, "batch", "sequence", "activation_heads", None)
        k = constrain(k, "batch", "sequence", "activation_kv", None)
        v = constrain(v, "batch", "sequence", "activation_kv", None)
        if cfg.qk_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if cfg.position is not None:
            positions = context.positions
            q, k = self.position(
                q, k, jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else positions
            )
        op = attention.AttentionOp(
            q,
            k,
            v,
            mask=self.mask(context),
            scale=cfg.scale or self.head_dim**-0.5,
            softcap=cfg.softcap,
            bias=None if cfg.position is None else bias_of(self.position),
        )
        if cache is None:
            context_vectors = op.context(cfg.kernel)
        else:
            context_vectors, cache = build_cache(cfg.kv_cache).attend(cache, op, cached_slots(context), cfg.kernel)
            context_vectors = op.as_context(context_vectors)
        return tag(self.output(context_vectors), "attention_out"), cache
