"""The reference of an objective: a frozen model that the trained model is compared with."""

from typing import Any

from flax import nnx

from axlearn_core.compose import FrozenModel
from axlearn_core.config import Node, find
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear, is_adapted
from axlearn_plugins_finetune.objectives.sequences import check_language_model


def build_reference(
    model: Node[Any], *, rngs: nnx.Rngs, config: Node[Any] | None = None, weights: str | None = None
) -> FrozenModel | None:
    """Build the reference of an objective.

    If the model has LoRA adapters and no other reference is named, the reference is the model without its adapters. It needs no
    arrays, so the result is None.

    Args:
        model: Config of the trained model.
        rngs: Random streams, as offered to the objective.
        config: Config of the reference. None uses the model's config.
        weights: Path or URI of the reference's weights. None uses the weights that training starts from.

    Raises:
        ConfigError: The reference is not a language model.
    """
    check_language_model(config or model, "objective.reference")
    is_separate = config is not None or weights is not None or not find(model, LoraLinear)
    return FrozenModel(config or model, rngs=rngs, weights=weights) if is_separate else None


def bind_reference(reference: FrozenModel | None, model: Any) -> Any:
    """Return the reference in evaluation mode. Apply `lax.stop_gradient` to its results.

    Args:
        reference: Result of `build_reference`.
        model: The bound model that is trained.
    """
    return reference.bind() if reference is not None else copy_for_evaluation(model, adapters=False)


def copy_for_evaluation(model: Any, *, adapters: bool = True) -> Any:
    """Return a copy of a bound model in evaluation mode. Its calls do not change the variables of the model.

    Args:
        model: The bound model.
        adapters: Whether the copy uses its LoRA adapters.
    """
    copy = nnx.merge(*nnx.split(model))
    copy.eval()
    for _, module in nnx.iter_modules(copy):
        if not adapters and is_adapted(module):
            module.lora_scale = 0.0  # pyright: ignore[reportAttributeAccessIssue]
    return copy
