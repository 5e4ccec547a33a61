"""The loss of held-out data by the scores of the model itself, without the terms that training adds."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from axlearn_core.contracts.capabilities import HasEvaluationLoss, HasHeldOutLoss
from axlearn_core.contracts.parts import Batch
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn import summaries

Measured = tuple[jax.Array, Mapping[str, Any]]


def model_loss(model: Any, batch: Batch) -> Measured:
    """(mean loss, summaries) of a held-out batch by the model's own scores, without auxiliary terms."""
    with summaries.held_out():
        return model.held_out_loss(batch) if isinstance(model, HasHeldOutLoss) else model.loss(batch)


def evaluation_loss(objective: Any, model: Any, batch: Batch) -> Measured:
    """(mean loss, summaries) of a held-out batch.

    An objective may regularise, so its training loss is never the measure: `evaluation_loss` is, of the objective or of the
    one that it is put around, and otherwise the loss of the model itself.

    Args:
        objective: bound, in evaluation; None if the model trains by its own loss.
        model: bound, in evaluation.
        batch: arrays [B, ...].

    Raises:
        ConfigError: the batches are not the model's, and no objective says how they are measured.
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
                message="does not say how held-out batches are measured, and the model's own loss cannot read them",
                got=f"{type(objective).__qualname__} without `evaluation_loss`, and batches of {', '.join(sorted(batch))}",
                expected=f"{error} in the batches, for the loss of {type(model).__qualname__}",
                fix="add `evaluation_loss(model, batch)` to the objective, or set evaluators={}",
            )
        ) from error
