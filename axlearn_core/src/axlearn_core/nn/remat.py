"""Rematerialisation by activation tag: what the backward pass keeps, and what it computes again.

Layers tag what they compute with `tag(x, name)`. The tags of the transformer's layers, to which other plugins add theirs:

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
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from axlearn_core.config import Configurable, node
from axlearn_core.errors import unknown
from axlearn_core.kernels.selection import kernel_tags

_tag_log: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("axlearn_tags", default=None)


def tag(x: jax.Array, name: str) -> jax.Array:
    """`x`, known to remat policies as `name`. It costs nothing at run time."""
    tags = _tag_log.get()
    if tags is not None:
        tags.add(name)
    return checkpoint_name(x, name)


class Remat(Configurable):
    """Recomputes a layer in the backward pass, except for the tagged activations that are saved or offloaded."""

    @node
    class Config(Configurable.Config["Remat"]):
        """What to save and what to offload.

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
            saveable = (
                policies.everything_saveable if save == "everything" else policies.dots_with_no_batch_dims_saveable
            )
        else:
            saveable = functools.partial(_is_saved, save)
        policy = functools.partial(_save_or_offload, self.cfg.offload, saveable) if self.cfg.offload else saveable

        def watched(*args: object) -> Any:
            token = _tag_log.set(self._tags)
            try:
                return function(*args)
            finally:
                _tag_log.reset(token)

        return jax.checkpoint(watched, policy=policy, prevent_cse=not in_loop)

    def check(self) -> None:
        """To be called when all wrapped functions were traced.

        Raises:
            RequestError: a tag that none of them has, and no kernel.
        """
        save = () if isinstance(self.cfg.save, str) else self.cfg.save
        check_tags(sorted({*save, *self.cfg.offload}), self._tags)


def check_tags(patterns: Sequence[str], tags: Collection[str]) -> None:
    """Raises `RequestError` for a pattern that fits none of the tags, nor any tag that a kernel has on some machines."""
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in tags):
            every = {*tags, *kernel_tags()}
            if not any(re.fullmatch(pattern, name) for name in every):
                raise unknown("activation tag in remat", pattern, every)


def _is_saved(patterns: Sequence[str], primitive: Any, *_: object, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: whether the value is one with a tag that is to be kept."""
    return primitive.name == "name" and any(re.fullmatch(p, params["name"]) for p in patterns)


def _save_or_offload(
    patterns: Sequence[str], saveable: Callable[..., Any], primitive: object, *args: object, **params: object
) -> Any:
    if not _is_saved(patterns, primitive, **params):
        return saveable(primitive, *args, **params)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[params["name"]],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return policy(primitive, *args, **params)
