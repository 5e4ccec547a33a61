"""Roles of layers, by which features, plans and servers find them. Imports no JAX.

The parts of a layer need no role, because the annotation of a slot names its kind. `rope` fills slots for a `PositionEncoding`,
`paged-cache` fills slots for a `KVCache` or a `LatentCache`, and `moe` fills slots for a `FeedForward`.
"""

from axlearn_core.config.roles import Role


class WindowRole(Role, fields=("window",)):
    """Attention whose `window` limits how many positions back a query sees: an int, a node that builds one, or None."""

    __slots__ = ()


class AttentionKernelRole(Role, fields=("kernel",)):
    """Attention whose `kernel` names a kernel of the op `attention`, or of the op that its cache runs."""

    __slots__ = ()


class LanguageModelRole(Role, fields=("vocab_size", "decoder")):
    """A model that builds a `LanguageModel`: `decoder` gives hidden states, and the model the logits of any of them."""

    __slots__ = ()


class OutputHeadRole(Role, fields=("head",)):
    """A decoder whose `head` builds the output layer; None takes the embedding transposed."""

    __slots__ = ()


class ExpertsRole(Role, fields=("num_experts", "top_k")):
    """A layer with `num_experts` experts, of which each token uses `top_k`."""

    __slots__ = ()


class TwoHalvesRole(Role):
    """A layer whose `__call__` is `attention_half` and then `feed_forward_half`, which maps each position on its own.

        def attention_half(self, x, context, cache=None): [B, S, D] and the cache of the layer -> ([B, S, D], the new cache)
        def feed_forward_half(self, x): [B, S, D] -> [B, S, D]

    Each class states it for itself (`states_role`): a subclass may compute something else.
    """

    __slots__ = ()


class OneByOneRole(Role):
    """A stack that runs separate layers one after the other, so that a layer may also be run behind it.

    Each class states it for itself (`states_role`): a subclass may compute something else.
    """

    __slots__ = ()


class TwoPartRole(Role):
    """A decoder whose `__call__` is `finish` of what `begin` gives (see `TwoPartDecoder`).

    Each class states it for itself (`states_role`): a subclass may compute something else.
    """

    __slots__ = ()
