"""Replay of recorded experts: a training step uses the experts that an engine chose for the same tokens.

See Ma et al., 2025 (R3, arXiv 2510.11370). A router receives activations, but neither the batch nor the cache, so the layer around
it activates a `Replay`, and the router looks it up. Shapes: B rows, S positions, K experts per token.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import attrs
import jax
import jax.numpy as jnp

from axlearn_core.nn.summaries import add_summary, mean_over_tokens

EXPERTS = "experts"
"""Name of the recorded experts, in `Context.layer_inputs` and among the records of an engine."""


@attrs.define(eq=False)
class Replay:
    """The recorded experts of one layer, and the experts that its router uses.

    Attributes:
        recorded: Recorded experts, int [B, S, K], or None. -1 marks tokens without a record.
        used: Whether routers use the recorded experts. If False, they only compare them with their own choice.
        chosen: Experts that the router used, int32 [B, S, K]. None before the router has run.
    """

    recorded: jax.Array | None = None
    used: bool = True
    chosen: jax.Array | None = None


_active: contextvars.ContextVar[Replay | None] = contextvars.ContextVar("axlearn_router_replay", default=None)


@contextlib.contextmanager
def use_replay(replay: Replay) -> Iterator[None]:
    """Let the routers that run inside this context manager replay and record experts."""
    token = _active.set(replay)
    try:
        yield
    finally:
        _active.reset(token)


def replay_choice(own: jax.Array) -> jax.Array:
    """Return the experts to use in place of a router's own choice, int32 [B, S, K].

    If there are recorded experts, the summary `router_mismatch` is the share of tokens for which the router itself would choose
    another set of experts.
    """
    replay = _active.get()
    if replay is None:
        return own
    expert = own
    if replay.recorded is not None:
        recorded = replay.recorded.astype(own.dtype)
        has_record = recorded[..., :1] >= 0
        differs = jnp.any(jnp.sort(recorded, axis=-1) != jnp.sort(own, axis=-1), axis=-1)
        add_summary("router_mismatch", mean_over_tokens((differs & has_record[..., 0]).astype(jnp.float32)))
        expert = jnp.where(has_record, recorded, own) if replay.used else own
    replay.chosen = expert
    return expert
