"""Find the batch shapes of an experiment without reading its data."""

from collections.abc import Mapping
from typing import Any

import jax

from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.errors import AxlearnError, RequestError


def abstract_batch(config: Any, vocab_size: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a mapping from the name of each array in a config's global training batches to its shape and dtype.

    Uses the `batch_shapes()` method of the input's config, which maps names to (shape, dtype) pairs. If the config has no such
    method, reads one batch, which requires the data.

    Args:
        config: A `Trainer.Config`, or a config with the same `input` and `build_input`.
        vocab_size: Vocabulary size of the model, for inputs that need it.

    Raises:
        RequestError: The input has no `batch_shapes()`, and no batch can be read.
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
            f"input: {kind} does not declare the shapes of its batches, and no batch can be read\n"
            f"    got: {error}\n"
            "    fix: make its data available, or add a method batch_shapes() -> {name: (shape, dtype)} to its config"
        ) from error
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
