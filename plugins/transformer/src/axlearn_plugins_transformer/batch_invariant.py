"""The `batch-invariant` feature: log-probabilities that do not depend on the rest of a batch."""

from typing import Any, TypeVar

import attrs

from axlearn_core.config import Node, node
from axlearn_core.config.tree import edit_nodes
from axlearn_core.plugins.feature import Feature, no_match_problem
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole, ExpertsKernelRole

Tree = TypeVar("Tree", bound=Node[Any])

KERNEL = "invariant"
"""Name of the batch-invariant kernel of each op."""


@node
class BatchInvariant(Feature):
    """Compute each row's results independently of the other rows of the batch.

    Attention and experts use their `invariant` kernels, and the compiler computes the rest of the model in the same order for every
    number of rows. Log-probabilities in float32 on CPUs are then bit-identical to those of a server in `parity` mode. Gradients may
    still depend on the batch. Steps are slower.
    """

    stage = "execute"
    replaces = ("model.**.kernel",)

    def apply(self, cfg: Tree) -> Tree:
        """Set `kernel` on attention layers and on the dispatches of experts."""
        return with_invariant_kernels(cfg, feature="batch-invariant")


def with_invariant_kernels(cfg: Tree, *, feature: str = "parity") -> Tree:
    """Return a config whose attention layers and experts use batch-invariant kernels.

    Args:
        cfg: Config of a model or of an experiment.
        feature: Name that an error reports.

    Raises:
        ConfigError: If the config has no such layer.
    """

    def change(_: str, part: Any) -> Any:
        return attrs.evolve(part, kernel=KERNEL) if isinstance(part, (AttentionKernelRole, ExpertsKernelRole)) else None

    roles = "an attention layer or experts: a node with the role AttentionKernelRole or ExpertsKernelRole"
    return edit_nodes(cfg, change, no_match=no_match_problem(feature, roles))
