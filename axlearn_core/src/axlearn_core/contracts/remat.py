"""`RematPolicy`: a named rematerialization policy. This module does not import JAX."""

import attrs


@attrs.frozen(kw_only=True)
class RematPolicy:
    """A named policy for the `remat` feature. The backward pass recomputes all activations that the policy does not list.

    Attributes:
        name: Name in `--with remat:policy=NAME`.
        save: Activation tags to save, or regular expressions that match whole tags.
        offload: Activation tags to keep in host memory, or regular expressions.
        description: One-line description.
    """

    name: str
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    description: str = ""
