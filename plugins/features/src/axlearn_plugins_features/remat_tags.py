"""Rematerialisation by tags that are not all known: of every tag but some, and by policies for any layer."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_policies

from axlearn_core.config import node
from axlearn_core.errors import unknown
from axlearn_core.nn.remat import Remat


class RematTags(Remat):
    """Computes the named activations again in the backward pass, and all that has no tag; keeps the other tagged ones.

    The complement of `Remat.save`, for layers whose tags are many.
    """

    @node
    class Config(Remat.Config):
        """`recompute` names tags. `save` and `offload` have no meaning here."""

        recompute: tuple[str, ...] = ()

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.recompute = cfg.recompute

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """`function`, rematerialised.

        Raises:
            RequestError: while tracing, for a tag that the function does not have.
        """
        policy = checkpoint_policies.save_any_names_but_these(*self.recompute)
        rematerialised = jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)

        def checked(*args: Any) -> Any:
            seen = set(_tags(jax.make_jaxpr(function)(*args).jaxpr))  # a second trace, and no second program
            for name in self.recompute:
                if name not in seen:
                    raise unknown("activation tag in remat", name, seen)
            return rematerialised(*args)

        return checked


class RematPolicyTags(Remat):
    """Keeps the tags of a policy that is meant for any layer: those that a layer does not have are not missed."""

    def check(self) -> None:
        """Everything is as it should be."""


def _tags(jaxpr: Any) -> Iterator[str]:
    """The names that `checkpoint_name` gave, in a jaxpr and all that it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _tags(inner)
