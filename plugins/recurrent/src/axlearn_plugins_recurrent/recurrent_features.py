"""The features `gated-delta-net`, `kimi-delta-attention` and `mamba2`."""

from typing import Any, Literal, TypeVar

import attrs

from axlearn_core.config import Node, get_options, node, setting
from axlearn_core.config.tree import fill_slots
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_recurrent.mamba2 import Mamba2
from axlearn_plugins_transformer.alternate import Alternate, change_slot
from axlearn_plugins_transformer.attention import Attention, AttentionLayer
from axlearn_plugins_transformer.layer_roles import RecurrentRole

Tree = TypeVar("Tree", bound=Node[Any])
EVERY = 4
"""Every fourth layer of Qwen3-Next and Kimi Linear has attention."""


class RecurrentFeature(Feature):
    """Base class of features that put a recurrent layer into most layers, and keep attention in every nth layer."""

    stage = "replace"
    before = ("alibi", "mla", "rope")  # they change the attention that is left
    no_bridge = "it keeps a state of fixed size instead of all keys and values; the weights of attention have no equivalent in it"

    label = ""  # the name of the feature, for messages
    attention_every: int | None

    def make(self, attention: Any) -> Any:
        """Return the recurrent layer, given the attention that it replaces."""
        raise NotImplementedError

    def edit(self, layer: Any) -> Any:
        """Return a recurrent layer with the options that were given, or None if it is of a different kind."""
        raise NotImplementedError

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
        kinds = (*old.first, *old.children) if isinstance(old, Alternate) else (old,)
        if any(isinstance(kind, RecurrentRole) for kind in kinds):
            return change_slot(old, self._edit)
        if isinstance(old, Alternate):
            raise ConfigError(
                Problem(
                    path="",
                    message=f"{self.label} cannot replace attention that alternates between kinds",
                    got=", ".join(type(kind).__qualname__ for kind in kinds),
                    fix=f"apply {self.label} before the feature that alternates, or write the `alternate` yourself",
                )
            )
        new = self.make(old)
        every = EVERY if self.attention_every is None else self.attention_every
        return new if every == 0 else Alternate(children=(new,) * (every - 1) + (old,))

    def _edit(self, layer: Any) -> Any:
        if not isinstance(layer, RecurrentRole):
            return layer
        edited = self.edit(layer)
        if edited is None or self.attention_every is not None:
            raise ConfigError(
                Problem(
                    path="",
                    message=f"{self.label} cannot change the recurrent layers that the model already has",
                    got=type(layer).__qualname__,
                    fix=f"leave {self.label} out, or edit the `alternate` in the attention slot",
                )
            )
        return edited


def _heads(attention: Any, number: int | None, name: str) -> int:
    """Return the number of heads of a recurrent layer: the given one, or that of the attention."""
    if number is not None:
        return number
    if isinstance(attention, Attention.Config):
        return attention.num_heads
    raise ConfigError(
        Problem(
            path="",
            message=f"{name} cannot take the number of heads from the attention that it replaces",
            got=type(attention).__qualname__,
            fix=f"set num_heads, as in --with {name}:num_heads=16",
        )
    )


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

    attention_every: int | None = setting(default=None, ge=0)
    num_heads: int | None = setting(default=None, ge=1)
    num_key_heads: int | None = setting(default=None, ge=1)
    key_dim: int | None = setting(default=None, ge=1)
    value_dim: int | None = setting(default=None, ge=1)

    def make(self, attention: Any) -> GatedDeltaNet.Config:
        """See `RecurrentFeature.make`."""
        heads = _heads(attention, self.num_heads, self.label)
        return GatedDeltaNet.Config(**{"num_heads": heads, **self._options()})

    def edit(self, layer: Any) -> Any:
        """See `RecurrentFeature.edit`."""
        return attrs.evolve(layer, **self._options()) if isinstance(layer, GatedDeltaNet.Config) else None

    def _options(self) -> dict[str, Any]:
        return get_options(self, "num_heads", "num_key_heads", "key_dim", "value_dim")


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

    attention_every: int | None = setting(default=None, ge=0)
    num_heads: int | None = setting(default=None, ge=1)
    key_dim: int | None = setting(default=None, ge=1)
    rank: int | None = setting(default=None, ge=1)

    def make(self, attention: Any) -> GatedDeltaNet.Config:
        """See `RecurrentFeature.make`."""
        sigmoid: Literal["sigmoid"] = "sigmoid"
        form: dict[str, Any] = {"decay_per": "element", "gate_activation": sigmoid, "rank": 128}
        heads = _heads(attention, self.num_heads, self.label)
        return GatedDeltaNet.Config(**{"num_heads": heads, **form, **self._options()})

    def edit(self, layer: Any) -> Any:
        """See `RecurrentFeature.edit`."""
        is_kimi = isinstance(layer, GatedDeltaNet.Config) and layer.decay_per == "element"
        return attrs.evolve(layer, **self._options()) if is_kimi else None

    def _options(self) -> dict[str, Any]:
        return get_options(self, "num_heads", "key_dim", "rank")


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

    attention_every: int | None = setting(default=None, ge=0)
    head_dim: int | None = setting(default=None, ge=1)
    state_dim: int | None = setting(default=None, ge=1)
    num_groups: int | None = setting(default=None, ge=1)

    def make(self, attention: Any) -> Mamba2.Config:
        """See `RecurrentFeature.make`."""
        return Mamba2.Config(**self._options())

    def edit(self, layer: Any) -> Any:
        """See `RecurrentFeature.edit`."""
        return attrs.evolve(layer, **self._options()) if isinstance(layer, Mamba2.Config) else None

    def _options(self) -> dict[str, Any]:
        return get_options(self, "head_dim", "state_dim", "num_groups")
