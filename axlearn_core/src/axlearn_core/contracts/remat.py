"""What a backward pass keeps, under a name. Imports no JAX."""

import attrs


@attrs.frozen(kw_only=True)
class RematPolicy:
    """A named choice for the feature `remat`; all activations that it does not name are computed again.

    Attributes:
        name: as in `--with remat:policy=NAME`.
        save: activation tags to keep, or regular expressions that fit whole tags.
        offload: those to keep in the host's memory.
        description: one line for people.
    """

    name: str
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    description: str = ""
