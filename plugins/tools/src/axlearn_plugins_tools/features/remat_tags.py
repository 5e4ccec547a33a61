"""Rematerialisation by tags that are not all known: of every tag but some, and by policies for any layer."""

import attrs

from axlearn_core.config import node
from axlearn_core.nn.remat import Remat, check_tags


class RematTags(Remat):
    """Computes the named activations again in the backward pass, and all that has no tag; keeps the other tagged ones.

    The complement of `Remat.save`, for layers whose tags are many.
    """

    @node
    class Config(Remat.Config):
        """`recompute` names tags, or regular expressions that fit whole tags. `save` has no meaning here."""

        recompute: tuple[str, ...] = ()

    def __init__(self, cfg: Config):
        super().__init__(attrs.evolve(cfg, save=(f"(?!(?:{'|'.join(cfg.recompute)})$).*",)))
        self.recompute = cfg.recompute

    def check(self) -> None:
        """See `Remat.check`."""
        check_tags(self.recompute, self._tags)


class RematPolicyTags(Remat):
    """Keeps the tags of a policy that is meant for any layer: those that a layer does not have are not missed."""

    def check(self) -> None:
        """Everything is as it should be."""
