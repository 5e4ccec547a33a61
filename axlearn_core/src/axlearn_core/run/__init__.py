"""Runs: a trained model with its config, lock, checkpoints, weights, and metrics. `Run(uri)` does not import JAX."""

from typing import TYPE_CHECKING

from axlearn_core.compat import lazy_names

if TYPE_CHECKING:
    from axlearn_core.run.derive import derive_run
    from axlearn_core.run.run import Run, open_weights
    from axlearn_core.run.weights import RunWeights, bind_weights, split_weights

__all__ = ["Run", "RunWeights", "bind_weights", "derive_run", "open_weights", "split_weights"]

_MODULES = {"Run": "run", "open_weights": "run", "derive_run": "derive"} | dict.fromkeys(
    ("RunWeights", "bind_weights", "split_weights"), "weights"
)


__getattr__ = lazy_names(__name__, _MODULES)
