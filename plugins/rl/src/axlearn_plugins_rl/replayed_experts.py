"""The sizes of recorded experts that a training step replays."""

from typing import Any

from axlearn_core.config import find
from axlearn_core.config.roles import CompetingTokensRole
from axlearn_core.errors import ConfigError, Problem
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_transformer.transformer import Decoder

MOST_EXPERTS = 2**15
"""Number of experts that a record can tell apart."""


def count_replayed(model: Any) -> tuple[int, int]:
    """Return the number of layers and of experts per token that a batch needs for the replay in a model, given as a config.

    Raises:
        ConfigError: The model has no experts, or its experts cannot be replayed.
    """
    experts: list[Any] = list(find(model, MixtureOfExperts.Config).values())
    decoders: list[Any] = list(find(model, Decoder.Config).values())
    counts = {part.top_k for part in experts}
    if len(decoders) != 1 or len(counts) != 1:
        raise ConfigError(
            Problem(
                path="model",
                message="router-replay needs a decoder whose tokens use the same number of experts in each layer with experts",
                got=f"{len(decoders)} decoders, and experts per token: {sorted(counts) or 'none'}",
                fix="add moe, or remove router-replay",
            )
        )
    if find(model, CompetingTokensRole):
        raise ConfigError(
            Problem(
                path="model",
                message="router-replay needs experts that depend only on the token",
                got=", ".join(sorted(find(model, CompetingTokensRole))),
                fix="use softmax-router or sigmoid-router, and dropless-dispatch",
            )
        )
    if max(part.num_experts for part in experts) > MOST_EXPERTS:
        raise ConfigError(
            Problem(
                path="model",
                message=f"router-replay records at most {MOST_EXPERTS} experts",
                fix="remove router-replay",
            )
        )
    return decoders[0].num_layers, counts.pop()
