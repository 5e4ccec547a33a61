"""The shapes of an experiment's batches, with no data at hand."""

from collections.abc import Mapping
from typing import Any

import jax

from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.errors import AxlearnError, RequestError


def abstract_batch(config: Any, vocab_size: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Name -> shape and dtype of each array of the global batches that a config trains on.

    An input says so itself: its config's method `batch_shapes()` gives name -> (shape, dtype). Of an input without that
    method one batch is read, for which its data has to be here.

    Args:
        config: a `Trainer.Config`, or one with the same `input` and `build_input`.
        vocab_size: of the model, for inputs that ask for it.

    Raises:
        RequestError: it does not say so, and no batch can be read.
    """
    if isinstance(config.input, DeclaresBatches) and (shapes := config.input.batch_shapes()):
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}
    kind = type(config.input).__qualname__
    try:
        batches = config.build_input(config.input, vocab_size).train()
        try:
            batch: Mapping[str, Any] = next(iter(batches))
        finally:
            batches.close()
    except AxlearnError as error:
        raise RequestError(
            f"input: {kind} does not say what its batches look like, and no batch can be read\n"
            f"    got: {error}\n"
            "    fix: make its data available, or give its config a method batch_shapes() -> {name: (shape, dtype)}"
        ) from error
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
