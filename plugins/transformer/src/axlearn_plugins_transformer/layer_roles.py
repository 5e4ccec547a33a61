"""Roles that features, plans and servers use to find layers.

This module does not import JAX.

The slots of a layer need no role, because their annotations say what they accept. `rope` fills `PositionEncoding` slots,
`paged-cache` fills `KVCache` and `LatentCache` slots, and `moe` fills `FeedForward` slots.
"""

from axlearn_core.config.roles import Role


class WindowRole(Role, fields=("window",)):
    """Attention with a `window`, the number of positions that a query sees.

    The window is an int, a node that builds one, or None.
    """

    __slots__ = ()


class AttentionKernelRole(Role, fields=("kernel",)):
    """Attention with a `kernel`.

    The kernel names an implementation of the `attention` op, or of the op that its cache uses.
    """

    __slots__ = ()


class ScoreScaleRole(Role, fields=("scale",)):
    """Attention with a `scale` of its scores: a number, a node that builds one (see `score_scale`), or None for the default."""

    __slots__ = ()


class WidthRole(Role, fields=("hidden_dim", "output_multiplier")):
    """A part of a model that determines its width, `hidden_dim`.

    `output_multiplier` is a factor of the logits: a number, or a node that builds one from the width.
    """

    __slots__ = ()


class RecurrentRole(Role):
    """A layer that keeps a state per request instead of its tokens; see `axlearn_plugins_transformer.recurrence`."""

    __slots__ = ()


class LanguageModelRole(Role, fields=("vocab_size", "decoder")):
    """A model that builds a `LanguageModel`.

    `decoder` computes hidden states, and the model computes their logits.
    """

    __slots__ = ()


class ExtraLossRole(Role):
    """A model with parameters that only its own loss trains, such as the heads of multi-token prediction.

    Objectives that do not call the model's `losses` refuse it.
    """

    __slots__ = ()


class OutputHeadRole(Role, fields=("head",)):
    """A decoder whose `head` builds the output layer.

    If `head` is None, the output layer is the transposed embedding.
    """

    __slots__ = ()


class ExpertsRole(Role, fields=("num_experts", "top_k")):
    """A layer with `num_experts` experts; each token uses `top_k` of them."""

    __slots__ = ()


class ExpertsKernelRole(Role, fields=("kernel",)):
    """A part that multiplies the tokens of experts with a `kernel` of the `grouped_matmul` op."""

    __slots__ = ()


class SplitLayerRole(Role):
    """A layer whose `__call__` runs `attention_half`, then `feed_forward_half`.

    `feed_forward_half` maps each position independently.

        def attention_half(self, x, context, cache=None): [B, S, D] and the layer's cache -> ([B, S, D], new cache)
        def feed_forward_half(self, x): [B, S, D] -> [B, S, D]

    Each class must declare the role (`states_role`), because a subclass may compute something else.
    """

    __slots__ = ()


class SequentialRole(Role):
    """A stack that runs separate layers in order.

    A caller may therefore run the last layer itself. Each class must declare the role (`states_role`), because a subclass may
    compute something else.
    """

    __slots__ = ()


class SplitDecoderRole(Role):
    """A decoder whose `__call__` computes `finish(begin(...))`; see `SplitDecoder`.

    Each class must declare the role (`states_role`), because a subclass may compute something else.
    """

    __slots__ = ()
