"""Runs: a trained model with its config, lock, checkpoints, weights and metrics. `Run(uri)` opens one without JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axlearn_core.run.derive import derive_run
    from axlearn_core.run.run import Run, open_weights
    from axlearn_core.run.weights import RunWeights, bind_weights, split_weights

__all__ = ["Run", "RunWeights", "bind_weights", "derive_run", "open_weights", "split_weights"]

_HOMES = {"Run": "run", "open_weights": "run", "derive_run": "derive"} | dict.fromkeys(
    ("RunWeights", "bind_weights", "split_weights"), "weights"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
