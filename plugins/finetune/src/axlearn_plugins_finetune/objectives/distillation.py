"""Distillation (Hinton et al., 2015, arXiv 1503.02531).

Shapes: B rows, S positions per row, C positions per chunk, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axlearn_core.compose import FrozenModel
from axlearn_core.config import Configurable, Node, node, setting
from axlearn_core.contracts.capabilities import vocabulary_size
from axlearn_core.contracts.parts import Batch, Model
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.nn import summaries
from axlearn_core.train.evaluation_loss import model_loss
from axlearn_plugins_finetune.objectives.sequences import check_language_model, sum_over_positions


class Distillation(Configurable, nnx.Module):
    """`alpha * T^2 * divergence + (1 - alpha) * cross-entropy`, averaged over the weighted targets.

    The divergence is KL(teacher || model), unless `interpolation` is set. Both of its distributions use the temperature T. The
    auxiliary losses of the model's layers are added, but its z-loss is not. Evaluation uses the model's own loss.
    """

    @node
    class Config(Configurable.Config["Distillation"]):
        """The loss and its teacher.

        Attributes:
            temperature: Temperature T.
            alpha: Weight of the divergence. The cross-entropy of the targets has the weight 1 - alpha.
            interpolation: 0 for KL(teacher || model), 1 for KL(model || teacher), which prefers the teacher's most likely answers,
                and a number between them for the generalized Jensen-Shannon divergence (Agarwal et al., 2024, arXiv 2306.13649).
            teacher: Config of the teacher. None uses the model's config.
            teacher_weights: Path or URI of the teacher's weights. None uses the weights that training starts from.
            loss_chunk: Positions per row whose logits are in memory at a time.
        """

        temperature: float = setting(default=1.0, gt=0)
        alpha: float = setting(default=0.5, gt=0, le=1)
        interpolation: float = setting(default=0.0, ge=0, le=1)
        teacher: Node[Model] | None = None
        teacher_weights: str | None = None
        loss_chunk: int = setting(default=128, kind="execution", ge=1)

    def __init__(self, cfg: Config, *, model: Node[Any], rngs: nnx.Rngs):
        teacher = cfg.teacher or model
        for config, path in ((model, "objective"), (teacher, "objective.teacher")):
            check_language_model(config, path)
        sizes = [vocabulary_size(config) for config in (teacher, model)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                Problem(
                    path="objective.teacher.vocab_size",
                    message="the teacher and the model have different vocabularies",
                    got=str(sizes[0]),
                    expected=f"{sizes[1]}, which is model.vocab_size",
                    fix="train the model with the teacher's tokenizer and vocab_size",
                )
            )
        self.cfg = cfg
        self.teacher = FrozenModel(teacher, rngs=rngs, weights=cfg.teacher_weights)

    def loss(self, model: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Mapping[str, Any]]:
        """See `axlearn_core.contracts.parts.Objective`.

        Args:
            model: A causal language model.
            batch: Batch of a language model. See `contracts.parts.Batch`.
            key: Unused, because the model has its own random streams.

        Returns:
            (loss, summaries). `teacher_kl` is the divergence without its factors, `cross_entropy` is the cross-entropy of the
            targets, and `weight` is the number of targets.
        """
        inputs = {k: v for k, v in batch.items() if v is not None}
        weights = inputs.get("weights", jnp.ones(inputs["targets"].shape, jnp.float32))
        with summaries.collect() as collected:
            hidden, _ = model.hidden_states(inputs)
        teacher = self.teacher.bind()
        teacher_hidden, _ = teacher.hidden_states(inputs)

        def chunk_losses(part: Any) -> tuple[jax.Array, jax.Array]:
            hidden, teacher_hidden, targets, weights = part
            return tuple(
                weights * x for x in self._token_losses(model.logits(hidden), teacher.logits(teacher_hidden), targets)
            )  # pyright: ignore[reportReturnType]

        arrays = (hidden, teacher_hidden, inputs["targets"], weights)
        weight = jnp.sum(weights)
        divisor = jnp.where(weight > 0, weight, 1.0)
        sums = sum_over_positions(chunk_losses, arrays, self.cfg.loss_chunk)
        divergence, entropy = (jnp.sum(x) / divisor for x in sums)
        alpha, temperature = self.cfg.alpha, self.cfg.temperature
        loss = alpha * temperature**2 * divergence + (1 - alpha) * entropy + sum(collected.losses.values())
        report = {"weight": weight, "teacher_kl": divergence, "cross_entropy": entropy}
        return loss, {**report, **collected.summaries, **collected.losses}

    def _token_losses(
        self, logits: jax.Array, teacher_logits: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Map [B, C, V], [B, C, V], int32 [B, C] to the divergence, float32 [B, C], and cross-entropy, float32 [B, C]."""
        logits, teacher_logits = logits.astype(jnp.float32), teacher_logits.astype(jnp.float32)
        student_log, teacher_log = (jax.nn.log_softmax(x / self.cfg.temperature) for x in (logits, teacher_logits))
        divergence = interpolated_divergence(student_log, teacher_log, self.cfg.interpolation)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
        return divergence, jax.nn.logsumexp(logits, axis=-1) - picked

    def evaluation_loss(self, model: Any, batch: Batch) -> tuple[jax.Array, Mapping[str, Any]]:
        """Return the model's own loss on held-out text, which does not depend on the teacher."""
        return model_loss(model, batch)


def interpolated_divergence(student_log: jax.Array, teacher_log: jax.Array, interpolation: float) -> jax.Array:
    """Return the generalized Jensen-Shannon divergence of each position (Agarwal et al., 2024, equation 1).

    Args:
        student_log: Log-probabilities of the model, float32 [..., V].
        teacher_log: Log-probabilities of the teacher, float32 [..., V].
        interpolation: Weight of the teacher in the mixture, from 0 to 1. 0 means KL(teacher || model), and 1 means
            KL(model || teacher), as in the paper.

    Returns:
        Float32 [...], in nats.
    """
    if interpolation == 0:
        return _divergence(teacher_log, student_log)
    if interpolation == 1:
        return _divergence(student_log, teacher_log)
    mixture = jnp.logaddexp(student_log + math.log1p(-interpolation), teacher_log + math.log(interpolation))
    of_teacher, of_student = _divergence(teacher_log, mixture), _divergence(student_log, mixture)
    return interpolation * of_teacher + (1 - interpolation) * of_student


def _divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
