"""Compute the evaluation loss of held-out batches, without the terms that training adds."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from axlearn_core.contracts.capabilities import HasEvaluationLoss, HasHeldOutLoss
from axlearn_core.contracts.parts import Batch
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn import summaries

LossAndSummaries = tuple[jax.Array, Mapping[str, Any]]


def model_loss(model: Any, batch: Batch) -> LossAndSummaries:
    """Return the model's own (mean loss, summaries) of a held-out batch, without auxiliary terms."""
    with summaries.held_out():
        return model.held_out_loss(batch) if isinstance(model, HasHeldOutLoss) else model.loss(batch)


def evaluation_loss(objective: Any, model: Any, batch: Batch) -> LossAndSummaries:
    """Return (mean loss, summaries) of a held-out batch.

    The training loss of an objective may include regularization, so it is not used. The result is the `evaluation_loss` of
    the objective, or of the objective that it wraps. If neither has one, it is the model's own loss.

    Args:
        objective: The bound objective in evaluation mode, or None if the model trains with its own loss.
        model: The bound model in evaluation mode.
        batch: Arrays of shape [B, ...].

    Raises:
        ConfigError: The model's own loss cannot read the batch, and the objective has no `evaluation_loss`.
    """
    if objective is None:
        return model_loss(model, batch)
    parts = sorted(nnx.iter_modules(objective), key=lambda part: len(part[0]))
    measure = next((part for _, part in parts if isinstance(part, HasEvaluationLoss)), None)
    with summaries.held_out():
        if measure is not None:
            return measure.evaluation_loss(model, batch)
    try:
        return model_loss(model, batch)
    except KeyError as error:
        raise ConfigError(
            Problem(
                path="objective",
                message="has no `evaluation_loss`, and the model's own loss cannot read the held-out batches",
                got=f"{type(objective).__qualname__} without `evaluation_loss`, and batches of {', '.join(sorted(batch))}",
                expected=f"{error} in the batches, for the loss of {type(model).__qualname__}",
                fix="add `evaluation_loss(model, batch)` to the objective, or set evaluators={}",
            )
        ) from error
