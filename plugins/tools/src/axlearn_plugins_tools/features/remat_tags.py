"""Rematerialization for layers that may have unknown tags."""

import attrs

from axlearn_core.config import node
from axlearn_core.nn.remat import Remat, check_tags


class RematTags(Remat):
    """Recomputes the named activations and those without a tag, and saves all other activations.

    This is the complement of `Remat.save`, for layers with many tags.
    """

    @node
    class Config(Remat.Config):
        """Settings for `RematTags`.

        Attributes:
            recompute: Tags, or regular expressions that match whole tags. `save` is ignored.
        """

        recompute: tuple[str, ...] = ()

    def __init__(self, cfg: Config):
        super().__init__(attrs.evolve(cfg, save=(f"(?!(?:{'|'.join(cfg.recompute)})$).*",)))
        self.recompute = cfg.recompute

    def check(self) -> None:
        """See `Remat.check`."""
        check_tags(self.recompute, self._tags)


class RematPolicyTags(Remat):
    """Saves the tags of a policy that applies to any layer. Missing tags are not an error."""

    def check(self) -> None:
        """Accept any tags."""
