"""The `remat` feature."""

import re
from collections.abc import Iterable
from typing import Any, TypeVar

from axlearn_core.config import Node, get_options, node
from axlearn_core.config.roles import StackRole
from axlearn_core.config.tree import set_fields
from axlearn_core.contracts.remat import RematPolicy
from axlearn_core.errors import PluginError, Problem, nearest
from axlearn_core.nn.remat import Remat
from axlearn_core.plugins.feature import Feature, no_match_problem
from axlearn_core.plugins.manager import host
from axlearn_plugins_tools.features.remat_tags import RematPolicyTags, RematTags

Tree = TypeVar("Tree", bound=Node[Any])

PLAIN = ("full", "none", "dots", "everything")


def policies() -> dict[str, RematPolicy]:
    """Return the policies of all plugins by name.

    Raises:
        PluginError: If two plugins use the same name.
    """
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
    """Selects the activations of each layer that the backward pass recomputes.

    Set at most one of these options. The default is `policy=full`.

    - `policy`: `full` saves only the layer's input, `dots` also the results of matmuls without a batch dimension, and
      `everything` all activations under a checkpoint. `none` removes rematerialization. Plugins add policies for layers of any
      kind. A layer does not need all tags of such a policy.
    - `save`: Activation tags to save (`[query, key, value, context]`), or regular expressions that match whole tags
      (`["mlp_.*"]`). All other activations are recomputed.
    - `recompute`: Tags or regular expressions to recompute. All other tagged activations are saved. Activations without a
      tag are recomputed.

    `offload` names tags to save in host memory, alone or together with `save`. If the layer does not have a tag,
    compilation fails and the error lists the available tags. If the experiment already uses rematerialization, this
    replaces it.
    """

    stage = "execute"
    replaces = ("model.**.remat",)

    policy: str | None = None
    save: tuple[str, ...] | None = None
    recompute: tuple[str, ...] | None = None
    offload: tuple[str, ...] = ()

    def validate(self) -> Iterable[Problem]:
        """Check for unknown policies, invalid patterns, and options that exclude each other."""
        if self.policy is not None and self.policy not in PLAIN and self.policy not in (tag_policies := policies()):
            names = [*PLAIN, *tag_policies]
            yield Problem(
                path="policy",
                message="no such policy",
                got=repr(self.policy),
                expected=f"one of {', '.join(map(repr, names))}",
                nearest=nearest(self.policy, names),
            )
        for name, patterns in get_options(self, "save", "recompute", "offload").items():
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield Problem(path=name, message=f"not a regular expression: {error}", got=repr(pattern))
        options = [*get_options(self, "policy", "save", "recompute")]
        if len(options) > 1:
            yield Problem(
                path=options[1], message=f"cannot be given together with {options[0]}", fix="remove one of them"
            )
        if self.offload and (self.policy is not None or self.recompute is not None):
            other = "policy" if self.policy is not None else "recompute"
            yield Problem(path="offload", message=f"cannot be given together with {other}", fix="use save instead")
        if both := sorted({*(self.save or ())} & {*self.offload}):
            yield Problem(
                path="offload", message="a tag cannot be both saved and offloaded", got=f"{', '.join(both)} in both"
            )

    def apply(self, cfg: Tree) -> Tree:
        """Set `remat` on every stack."""
        problem = no_match_problem("remat", "a stack of layers: a node with the role StackRole")
        return set_fields(cfg, StackRole, {"remat": self._node()}, no_match=problem)

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
