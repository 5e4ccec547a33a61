"""Rematerialisation by activation tag: what the backward pass keeps, and what it computes again.

Layers tag what they compute with `tag(x, name)`. The tags of the core's layers:

    query, key, value     projected, before normalisation and position encoding   [B, S, heads, H]
    context               what attention returns                                  [B, S, N, H]
    attention_out         after its output projection                             [B, S, D]
    mlp_gate, mlp_up      projected                                               [B, S, F]
    mlp_hidden            after the activation                                    [B, S, F]
    mlp_out               after the down projection                               [B, S, D]
"""

import contextvars
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.config import Configurable, node
from axlearn_core.errors import unknown

_seen: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("axlearn_tags", default=None)


def tag(x: jax.Array, name: str) -> jax.Array:
    """`x`, known to remat policies as `name`. It costs nothing at run time."""
    seen = _seen.get()
    if seen is not None:
        seen.add(name)
    return checkpoint_name(x, name)


class Remat(Configurable):
    """Computes a layer again in the backward pass, except for what is kept."""

    @node
    class Config(Configurable.Config["Remat"]):
        """What to keep.

        `save` names tags, or regular expressions that fit whole tags (`mlp_.*`), or a general policy: `nothing`, `dots`
        (products without a batch dimension) or `everything`. Tags in `offload` are kept in the host's memory.
        """

        save: tuple[str, ...] | Literal["nothing", "dots", "everything"] = ()
        offload: tuple[str, ...] = ()

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._tags: set[str] = set()

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """`function`, rematerialised. `in_loop`: as the body of a scan, where no compiler merges what is computed
        twice.
        """
        policies = jax.checkpoint_policies
        save = () if self.cfg.save == "nothing" else self.cfg.save
        if isinstance(save, str):
            kept = policies.everything_saveable if save == "everything" else policies.dots_with_no_batch_dims_saveable
        else:
            kept = functools.partial(_kept, save)
        policy = functools.partial(_offloaded, self.cfg.offload, kept) if self.cfg.offload else kept

        def watched(*args: Any) -> Any:
            token = _seen.set(self._tags)
            try:
                return function(*args)
            finally:
                _seen.reset(token)

        return jax.checkpoint(watched, policy=policy, prevent_cse=not in_loop)

    def check(self) -> None:
        """To be called when all wrapped functions were traced.

        Raises:
            RequestError: a tag that none of them has.
        """
        save = () if isinstance(self.cfg.save, str) else self.cfg.save
        for pattern in sorted({*save, *self.cfg.offload}):
            if not any(re.fullmatch(pattern, name) for name in self._tags):
                raise unknown("activation tag in remat", pattern, self._tags)


def _kept(patterns: Sequence[str], primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: whether the value is one with a tag that is to be kept."""
    return primitive.name == "name" and any(re.fullmatch(p, params["name"]) for p in patterns)


def _offloaded(patterns: Sequence[str], kept: Callable[..., Any], primitive: Any, *args: Any, **params: Any) -> Any:
    if not _kept(patterns, primitive, **params):
        return kept(primitive, *args, **params)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[params["name"]],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return policy(primitive, *args, **params)
