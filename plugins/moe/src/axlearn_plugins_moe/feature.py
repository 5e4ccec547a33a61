"""The `moe` feature."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, Scaled, get_fields, get_options, node, setting
from axlearn_core.config.node import is_interface
from axlearn_core.config.tree import fill_slots
from axlearn_core.config.wrappers import edit_innermost, slot_nodes
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_moe.dispatch import Dispatch
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routing import Router
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.feed_forward import FeedForward, GatedFeedForward, PlainFeedForward

Tree = TypeVar("Tree", bound=Node[Any])


@node
class MoE(Feature):
    """Replaces every feed-forward layer with a mixture of experts.

    By default, a softmax router chooses 2 of 8 experts for each token, and no token is dropped. Experts take the hidden
    size, the activation and the linear maps of the layer that they replace.

    If the model already has experts, the feature sets the given options and keeps the other settings. `every` and `dense_layers`
    then move the experts to other layers. This works only if some layers still have a dense feed-forward layer to copy.

    Attributes:
        num_experts: Number of experts (default: 8).
        top_k: Experts per token (default: 2).
        every: Replace the last of every `every` layers (default: 1, every layer).
        dense_layers: Number of layers at the bottom that stay dense (default: 0).
        router: Router, such as `{type: sigmoid-router}`.
        dispatch: Dispatch, such as `{type: capacity-dispatch, capacity_factor: 1.5}`.
        shared_experts: Size, in experts, of an additional feed-forward layer that every token uses (default: 0).
        hidden_dim: Hidden size of one expert (default: that of the replaced layer).
    """

    stage = "replace"
    bridge = "axlearn_plugins_moe.upcycle:bridge"

    num_experts: int | None = setting(default=None, ge=1, le=2**16)
    top_k: int | None = setting(default=None, ge=1)
    every: int | None = setting(default=None, ge=1)
    dense_layers: int | None = setting(default=None, ge=0)
    router: Node[Router] | None = None
    dispatch: Node[Dispatch] | None = None
    shared_experts: int | None = setting(default=None, ge=0)
    hidden_dim: int | Node[int] | None = setting(default=None, ge=1)

    def apply(self, cfg: Tree) -> Tree:
        """Put experts into every feed-forward slot."""
        no_match = Problem(
            path="model",
            message="moe finds no feed-forward layer to replace",
            expected="a layer with a slot `Node[FeedForward]`",
            fix="leave moe out, or annotate the feed-forward layer's slot as `Node[FeedForward]`",
        )
        fill = lambda _, old: self._fill_slot(old) if isinstance(old, Node) else None  # noqa: E731
        return fill_slots(cfg, FeedForward, fill, no_match=no_match)

    def _fill_slot(self, old: Node[Any]) -> Node[Any]:
        """Return the config that replaces `old` in a slot."""
        kinds = (*old.first, *old.children) if isinstance(old, Alternate) else (old,)
        if not any(map(_has_experts, kinds)):
            if not isinstance(old, Alternate):
                return _arrange_layers(old, self._replace(old), self.dense_layers or 0, self.every or 1)
            if self.every is not None or self.dense_layers is not None:
                raise _incompatible(
                    "feed-forward layers alternate here already", "leave `every` and `dense_layers` out"
                )
            return edit_innermost(old, self._replace)
        lead, every = (len(old.first), len(old.children)) if isinstance(old, Alternate) else (0, 1)
        layout = lead if self.dense_layers is None else self.dense_layers, every if self.every is None else self.every
        if layout == (lead, every):
            return edit_innermost(old, lambda kind: self._set_options(kind) if _has_experts(kind) else kind)
        dense = [k for k in kinds if not _has_experts(k)]
        if layout != (0, 1) and not dense:
            raise _incompatible(
                "every layer has experts already, so there is no feed-forward layer to copy to the other layers",
                "leave `every` and `dense_layers` out, or start from a model without experts",
            )
        if old != _arrange_layers(dense[0], kinds[-1], lead, every):
            raise _incompatible(
                "experts and feed-forward layers are mixed here", "leave `every` and `dense_layers` out"
            )
        return _arrange_layers(dense[0] if dense else old, edit_innermost(kinds[-1], self._set_options), *layout)

    def _replace(self, old: Any) -> MixtureOfExperts.Config:
        """Return experts for a feed-forward layer.

        Raise ConfigError if the experts would lose one of the layer's settings.
        """
        default = MixtureOfExperts.Config()
        settings = {"hidden_dim", "activation", "form", "dtype", "param_dtype", "gate", "up", "down"}
        fields, old_fields = attrs.fields_dict(type(old)), get_fields(old)
        lost = [
            Problem(
                path=name,
                message="would be lost: experts have no such setting",
                got=repr(old_fields[name]),
                fix="set it back to its default, or leave moe out",
            )
            for name, a in fields.items()
            if name not in settings and not is_interface(a) and old_fields[name] != a.default
        ]
        if lost:
            raise ConfigError(lost)
        values: dict[str, Any] = {name: old_fields[name] for name in settings & fields.keys()}
        if "up" in fields and "gate" not in fields:
            values["gate"] = None
        return self._set_options(attrs.evolve(default, **values))

    def _set_options(self, experts: Any) -> MixtureOfExperts.Config:
        """Return the experts with the given options set."""
        options = get_options(self, "num_experts", "top_k", "router", "dispatch", "hidden_dim")
        new = attrs.evolve(experts, **options)
        if self.shared_experts is None:
            return new
        if not self.shared_experts:
            return attrs.evolve(new, shared=None, shared_gate=None)
        return attrs.evolve(new, shared=_shared_expert(new, self.shared_experts))


def _shared_expert(experts: MixtureOfExperts.Config, count: int) -> Node[FeedForward]:
    """Return a feed-forward layer with the size of `count` experts."""
    size = experts.hidden_dim
    if isinstance(size, int):
        size = size * count
    elif isinstance(size, Scaled):
        size = attrs.evolve(size, factor=size.factor * count)
    else:
        raise _incompatible(f"cannot compute {count} times the size {size!r}", "set the experts' `shared` yourself")
    sizes: dict[str, Any] = {
        "hidden_dim": size,
        "activation": experts.activation,
        "up": experts.up,
        "down": experts.down,
    }
    if experts.gate is None:
        return PlainFeedForward.Config(**sizes)
    return GatedFeedForward.Config(gate=experts.gate, form=experts.form, **sizes)


def _has_experts(kind: Any) -> bool:
    return any(isinstance(part, MixtureOfExperts.Config) for _, part in slot_nodes(kind))


def _arrange_layers(dense: Any, experts: Any, lead: int, every: int) -> Any:
    """Return `lead` dense layers, then experts in the last of every `every` layers."""
    if (lead, every) == (0, 1):
        return experts
    return Alternate(first=(dense,) * lead, children=(*(dense,) * (every - 1), experts))


def _incompatible(message: str, fix: str) -> ConfigError:
    return ConfigError(Problem(path="", message=message, fix=fix))
