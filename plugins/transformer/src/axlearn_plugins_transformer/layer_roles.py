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


class ExpertsRole(Role, fields=("num_experts", "top_k")):
    """A layer with `num_experts` experts, of which each token uses `top_k`."""

    __slots__ = ()
