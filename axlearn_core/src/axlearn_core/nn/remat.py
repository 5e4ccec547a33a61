"""Rematerialization by activation tag.

Layers tag activations with `tag(x, name)`. A policy lists the tags to save; the backward pass recomputes all other activations.
Transformer layers use these tags, and other plugins add more:

    query, key, value     projections, before normalization and position encoding   [B, S, heads, H]
    context               attention output, before the output projection            [B, S, N, H]
    attention_out         attention output, after the output projection             [B, S, D]
    mlp_gate, mlp_up      gate and up projections                                   [B, S, F]
    mlp_hidden            hidden activations                                        [B, S, F]
    mlp_out               down projection                                           [B, S, D]
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
    """Tag `x` for remat policies. Tags have no runtime cost."""
    tags = _tag_log.get()
    if tags is not None:
        tags.add(name)
    return checkpoint_name(x, name)


class Remat(Configurable):
    """Rematerialization policy for a layer.

    The backward pass recomputes all activations except those that are saved or offloaded.
    """

    @node
    class Config(Configurable.Config["Remat"]):
        """Activations to save and to offload.

        Attributes:
            save: Tags, or regular expressions that match whole tags (`mlp_.*`). It may also be a general policy:
                `nothing`, `dots` (matmuls without a batch dimension), or `everything`.
            offload: Tags, or regular expressions, of activations to keep in host memory.
        """

        save: tuple[str, ...] | Literal["nothing", "dots", "everything"] = ()
        offload: tuple[str, ...] = ()

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._tags: set[str] = set()

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """Rematerialize a function.

        Args:
            function: The function.
            in_loop: True for the body of a scan. XLA cannot merge its duplicate computations, so no barrier is needed.
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
        """Check the tags in the config. Call this after all wrapped functions have been traced.

        Raises:
            RequestError: If a tag exists neither in these functions nor in an installed kernel.
        """
        save = () if isinstance(self.cfg.save, str) else self.cfg.save
        check_tags(sorted({*save, *self.cfg.offload}), self._tags)


def check_tags(patterns: Sequence[str], tags: Collection[str]) -> None:
    """Raise `RequestError` if a pattern matches neither one of `tags` nor a tag of an installed kernel."""
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in tags):
            every = {*tags, *kernel_tags()}
            if not any(re.fullmatch(pattern, name) for name in every):
                raise unknown("activation tag in remat", pattern, every)


def _is_saved(patterns: Sequence[str], primitive: Any, *_: object, **params: Any) -> bool:
    """Policy for `jax.checkpoint` that saves values whose tag matches a pattern."""
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
