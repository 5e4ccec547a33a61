"""`EngineWeights`: the arrays that steps read, copied from a model's weights or shared with their owner."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs
import jax
from flax import nnx

from axlearn_core.compose import Functional, ModelWeights
from axlearn_core.compose.functions import Part
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.errors import RequestError


class KeptArray(NamedTuple):
    """An array that steps read as the model has it.

    Attributes:
        source: Path of the array in the model.
        sharding: Sharding of the array in steps.
    """

    source: str
    sharding: jax.sharding.Sharding


@attrs.frozen(eq=False)
class EngineWeights:
    """The arrays that steps read.

    Attributes:
        arrays: Arrays by the path that steps use.
        shared: Those of the arrays that may belong to the caller as well.
        copied_bytes: Number of bytes that were copied, transferred or transposed for the arrays.
    """

    arrays: Mapping[str, Any]
    shared: tuple[jax.Array, ...] = ()
    copied_bytes: int = 0

    def read(self) -> Mapping[str, Any]:
        """Return the arrays.

        Raises:
            RequestError: If the owner of shared arrays has donated or deleted them.
        """
        if any(x.is_deleted() for x in self.shared):
            raise RequestError(
                "the engine shares its weights with a training program, which has donated them to a training step\n"
                "    fix: call `update_weights` after each training step, or update them with share=False"
            )
        return self.arrays


def place_weights(
    program: ModelProgram, weights: ModelWeights, unchanged: Mapping[str, KeptArray], *, share: bool = False
) -> EngineWeights:
    """Arrange weights as the steps of a runner's program read them.

    Args:
        program: Program with the functions `serve_weights` and `serve_layout`.
        weights: Weights of the program's model, which stay valid.
        unchanged: The arrays that steps read as the model has them, by the path that steps use. Only read with `share`.
        share: Whether to use these arrays themselves if they have the sharding of steps.

    Raises:
        RequestError: If the weights do not fit the model, or are donated already.
    """
    check_weights(program, weights)
    sources = {**weights.params, **weights.variables}
    places = {path: s.sharding for part in _parts(program.parts[Part.WEIGHTS]) for path, s in part.items()}
    moved = sum(x.nbytes for path, x in sources.items() if path in places and not _is_placed(x, places[path]))
    placed = program.place(weights)
    if not share:
        arrays = program.compile("serve_weights")(placed)
        return EngineWeights(arrays, copied_bytes=moved + _count_bytes(arrays))
    on_devices = {**placed.params, **placed.variables}
    shared = {path: jax.device_put(on_devices[x.source], x.sharding) for path, x in unchanged.items()}
    moved += sum(
        on_devices[x.source].nbytes for x in unchanged.values() if not _is_placed(on_devices[x.source], x.sharding)
    )
    changed = program.compile("serve_layout")(placed)
    return EngineWeights({**shared, **changed}, tuple(shared.values()), moved + _count_bytes(changed))


def check_weights(program: ModelProgram, weights: ModelWeights) -> None:
    """Raise `RequestError` unless weights have the shapes and dtypes of a program's model, and exist."""
    for part, specs in zip(_parts(weights), _parts(program.functional.specs), strict=True):
        for path, spec in specs.items():
            array = part.get(path)
            if array is None or (tuple(array.shape), array.dtype) != (tuple(spec.shape), spec.dtype):
                raise RequestError(
                    f"the weights do not fit the served model: {path}\n"
                    f"    got: {'nothing' if array is None else f'{array.dtype} {tuple(array.shape)}'}\n"
                    f"    expected: {spec.dtype} {tuple(spec.shape)}"
                )
            if isinstance(array, jax.Array) and array.is_deleted():
                raise RequestError(
                    f"the weights were donated or deleted before the update: {path}\n"
                    "    fix: pass the weights of the newest training state"
                )


def _parts(weights: ModelWeights) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return weights.params, weights.variables


def _is_placed(array: Any, sharding: jax.sharding.Sharding) -> bool:
    return isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim)


def _count_bytes(arrays: Mapping[str, Any]) -> int:
    return sum(x.nbytes for x in arrays.values())


def model_weights(functional: Functional, model: Any) -> ModelWeights:
    """Return the arrays of a model. The model may lack the adapters of `functional`."""
    flat = {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(nnx.state(model))}
    parts = functional.abstract, functional.variables
    return ModelWeights(*({p: flat[p] for p in part if p in flat} for part in parts))
