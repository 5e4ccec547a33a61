"""The feature `remat`."""

import re
from collections.abc import Iterable
from typing import Any, TypeVar

from axlearn_core.config import Node, node, options_of
from axlearn_core.config.roles import StackRole
from axlearn_core.config.tree import set_fields
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.errors import PluginError, Problem, nearest
from axlearn_core.nn.remat import Remat
from axlearn_core.plugins.feature import Feature, nothing_to_set
from axlearn_core.plugins.manager import host
from axlearn_plugins_tools.features.remat_tags import RematPolicyTags, RematTags

Tree = TypeVar("Tree", bound=Node[Any])

PLAIN = ("full", "none", "dots", "everything")


def policies() -> dict[str, RematPolicy]:
    """The policies of plugins, by name; raises `PluginError` where two plugins claim one."""
    by_name: dict[str, tuple[str, RematPolicy]] = {}
    for origin, declared in host().call("axlearn_remat_policies"):
        for policy in declared:
            if policy.name in PLAIN or policy.name in by_name:
                other = by_name[policy.name][0] if policy.name in by_name else "the feature remat itself"
                raise PluginError(f"the remat policy {policy.name!r} is claimed by {other} and by {origin}")
            by_name[policy.name] = (origin, policy)
    return {name: policy for name, (_, policy) in by_name.items()}


@node
class UseRemat(Feature):
    """Says what the backward pass keeps of each layer, and what it computes again.

    One of these, by default `policy=full`:

    - `policy`: `full` keeps nothing but the layer's input, `dots` the products without a batch dimension, `everything`
      all of it under a checkpoint, `none` takes rematerialisation out; plugins have more, for layers of any kind, which need
      not have all of their tags;
    - `save`: the activation tags to keep (`[query, key, value, context]`), or regular expressions that fit whole tags
      (`["mlp_.*"]`); all else is computed again;
    - `recompute`: the tags to compute again (expressions too); every other tagged activation is kept, and what has no tag
      is not.

    `offload` names tags to keep in the host's memory, alone or with `save`. A tag that the layer does not have stops
    the run while it is compiled, with the tags that there are. On an experiment with rematerialisation this replaces
    it.
    """

    stage = "execute"

    policy: str | None = None
    save: tuple[str, ...] | None = None
    recompute: tuple[str, ...] | None = None
    offload: tuple[str, ...] = ()

    def validate(self) -> Iterable[Problem]:
        """Options that contradict one another, and a policy that nobody has."""
        if self.policy is not None and self.policy not in PLAIN and self.policy not in (tag_policies := policies()):
            names = [*PLAIN, *tag_policies]
            yield Problem(
                path="policy",
                message="no such policy",
                got=repr(self.policy),
                expected=f"one of {', '.join(map(repr, names))}",
                nearest=nearest(self.policy, names),
            )
        for name, patterns in options_of(self, "save", "recompute", "offload").items():
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield Problem(path=name, message=f"no regular expression: {error}", got=repr(pattern))
        options = [*options_of(self, "policy", "save", "recompute")]
        if len(options) > 1:
            yield Problem(
                path=options[1], message=f"cannot be given together with {options[0]}", fix="leave one of them out"
            )
        if self.offload and (self.policy is not None or self.recompute is not None):
            other = "policy" if self.policy is not None else "recompute"
            yield Problem(path="offload", message=f"cannot be given together with {other}", fix="use save with it")
        if both := sorted({*(self.save or ())} & {*self.offload}):
            yield Problem(path="offload", message="a tag is kept in one place", got=f"{', '.join(both)} in save too")

    def apply(self, cfg: Tree) -> Tree:
        """Sets `remat` of every stack."""
        nothing = nothing_to_set("remat", "a stack of layers: a node with the role StackRole")
        return set_fields(cfg, StackRole, {"remat": self._node()}, nothing=nothing)

    def _node(self) -> Node[Remat] | None:
        if self.policy == "none":
            return None
        if self.recompute is not None:
            return RematTags.Config(recompute=self.recompute)
        if self.policy in ("dots", "everything"):
            return Remat.Config(save=self.policy)
        if self.policy is not None and self.policy != "full":
            policy = policies()[self.policy]
            return RematPolicyTags.Config(save=policy.save, offload=policy.offload)
        return Remat.Config(save=self.save or (), offload=self.offload)
