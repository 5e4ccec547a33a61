"""The features `gated-delta-net`, `kimi-delta-attention` and `mamba2`."""

from types import MappingProxyType
from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, get_options, node, setting
from axlearn_core.config.node import get_fields
from axlearn_core.config.tree import fill_slots
from axlearn_core.config.wrappers import edit_innermost
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_transformer.alternate import Alternate
from axlearn_plugins_transformer.attention import Attention, AttentionLayer
from axlearn_plugins_transformer.layer_roles import RecurrentRole

Tree = TypeVar("Tree", bound=Node[Any])
EVERY = 4
"""Every fourth layer of Qwen3-Next and Kimi Linear has attention."""


class RecurrentFeature(Feature):
    """Base class of features that put a recurrent layer into most layers, and keep attention in every nth layer.

    Class attributes of a subclass:

    - `label`: name of the feature, for messages;
    - `kind`: config class of the layer;
    - `form`: fields that distinguish the layer from others of its class;
    - `defaults`: values of options that are not set, if they differ from those of the layer.

    Every option but `attention_every` sets the field of the layer with its name.
    """

    stage = "replace"
    before = ("alibi", "mla", "rope")  # they change the attention that is left
    no_bridge = "it keeps a state of fixed size instead of all keys and values; the weights of attention have no equivalent in it"
    label = ""
    kind = GatedDeltaNet.Config
    form = MappingProxyType({})
    defaults = MappingProxyType({})

    attention_every: int | None

    def apply(self, cfg: Tree) -> Tree:
        """Replace the attention in every slot for it. If the model already has recurrent layers, set the given options."""
        no_match = Problem(
            path="model",
            message=f"{self.label} finds no attention to replace",
            expected="a layer with a slot `Node[AttentionLayer]`",
            fix=f"leave {self.label} out",
        )
        return fill_slots(cfg, AttentionLayer, lambda _, old: self._fill(old), no_match=no_match)

    def _fill(self, old: Any) -> Any:
        if old is None:  # a layer without attention
            return None
        kinds = (*old.first, *old.children) if isinstance(old, Alternate) else (old,)
        if any(isinstance(kind, RecurrentRole) for kind in kinds):
            return edit_innermost(old, self._edit)
        if isinstance(old, Alternate):
            raise ConfigError(
                Problem(
                    path="",
                    message=f"{self.label} cannot replace attention that alternates between kinds",
                    got=f"{len(kinds)} layers of {', '.join(dict.fromkeys(type(kind).__qualname__ for kind in kinds))}",
                    fix=f"apply {self.label} before the feature that alternates, or write the `alternate` yourself",
                )
            )
        every = EVERY if self.attention_every is None else self.attention_every
        new = self._make(old)
        return new if every == 0 else Alternate(children=(new,) * (every - 1) + (old,))

    def _make(self, attention: Any) -> Any:
        fields = get_fields(attention)
        if fields.get("causal") is False:
            raise ConfigError(
                Problem(
                    path="causal",
                    message=f"{self.label} cannot replace attention that sees later positions; a state has only earlier ones",
                    got="False",
                    expected="causal attention",
                    fix=f"leave {self.label} out",
                )
            )
        values = {**self.form, **self.defaults, **self._options()}
        if "num_heads" in get_fields(self) and "num_heads" not in values:
            values["num_heads"] = self._heads_of(attention)
        return self.kind(**values)

    def _heads_of(self, attention: Any) -> int:
        if isinstance(attention, Attention.Config):
            return attention.num_heads
        raise ConfigError(
            Problem(
                path="",
                message=f"{self.label} cannot take the number of heads from the attention that it replaces",
                got=type(attention).__qualname__,
                fix=f"set num_heads, as in --with {self.label}:num_heads=16",
            )
        )

    def _options(self) -> dict[str, Any]:
        options = get_options(self)
        options.pop("attention_every", None)
        return options

    def _edit(self, layer: Any) -> Any:
        if not isinstance(layer, RecurrentRole):
            return layer
        fields = get_fields(layer)
        same = isinstance(layer, self.kind) and all(fields[name] == value for name, value in self.form.items())
        if not same or self.attention_every is not None:
            raise ConfigError(
                Problem(
                    path="",
                    message=f"{self.label} cannot change the recurrent layers that the model already has",
                    got=type(layer).__qualname__,
                    fix=f"leave {self.label} out, or edit the `alternate` in the attention slot",
                )
            )
        return attrs.evolve(layer, **self._options())


@node
class UseGatedDeltaNet(RecurrentFeature):
    """Replaces attention with gated DeltaNet, except in every nth layer.

    Layers n - 1, 2 n - 1, ... (from 0) keep their attention. By default, there are as many heads as in the attention, whose size
    is the width divided by their number.

    Attributes:
        attention_every: n (default: 4, as in Qwen3-Next). 0 keeps no attention.
        num_heads: Number of heads of the values.
        num_key_heads: Number of heads of the queries and keys (default: `num_heads`).
        key_dim: Size of a key.
        value_dim: Size of a value.
    """

    label = "gated-delta-net"
    excludes = ("kimi-delta-attention", "mamba2")
    form = MappingProxyType({"decay_per": "head"})

    attention_every: int | None = setting(default=None, ge=0)
    num_heads: int | None = setting(default=None, ge=1)
    num_key_heads: int | None = setting(default=None, ge=1)
    key_dim: int | None = setting(default=None, ge=1)
    value_dim: int | None = setting(default=None, ge=1)


@node
class UseKimiDeltaAttention(RecurrentFeature):
    """Replaces attention with Kimi delta attention, except in every nth layer.

    It is a gated DeltaNet with a decay for each element of a key, and low-rank maps to decays and gates. Layers n - 1, 2 n - 1, ...
    (from 0) keep their attention.

    Attributes:
        attention_every: n (default: 4, as in Kimi Linear). 0 keeps no attention.
        num_heads: Number of heads (default: that of the attention).
        key_dim: Size of a key (default: the width divided by `num_heads`).
        rank: Rank of the maps to decays and gates (default: 128, as in Kimi Linear).
    """

    label = "kimi-delta-attention"
    excludes = ("gated-delta-net", "mamba2")
    form = MappingProxyType({"decay_per": "element"})
    defaults = MappingProxyType({"gate_activation": "sigmoid", "rank": 128})

    attention_every: int | None = setting(default=None, ge=0)
    num_heads: int | None = setting(default=None, ge=1)
    key_dim: int | None = setting(default=None, ge=1)
    rank: int | None = setting(default=None, ge=1)


@node
class UseMamba2(RecurrentFeature):
    """Replaces attention with Mamba-2, except in every nth layer.

    Layers n - 1, 2 n - 1, ... (from 0) keep their attention.

    Attributes:
        attention_every: n (default: 4). 0 keeps no attention.
        head_dim: Size of a head (default: 64).
        state_dim: Size of keys and queries (default: 128).
        num_groups: Number of groups of heads that share keys and queries (default: 1).
    """

    label = "mamba2"
    excludes = ("gated-delta-net", "kimi-delta-attention")
    kind = Mamba2.Config

    attention_every: int | None = setting(default=None, ge=0)
    head_dim: int | None = setting(default=None, ge=1)
    state_dim: int | None = setting(default=None, ge=1)
    num_groups: int | None = setting(default=None, ge=1)
