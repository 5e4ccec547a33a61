"""`Function`: a pure function of a program, together with its abstract arguments."""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import jax

from axlearn_core.compose.functional import Functional, ModelWeights

BATCH_AXES = ("batch", "sequence")


class Part(enum.Enum):
    """Placeholder for arrays of the program, in a function's abstract arguments and results."""

    STATE = "the training state"
    WEIGHTS = "the model's parameters and variables"
    TRAINED = "the parameters and variables of the model and of its objective"
    KEY = "a random key"
    REPLICATED = "a replicated result"


@attrs.frozen
class Array:
    """An abstract array with a logical axis name (or None) for each dimension.

    Attributes:
        path: Name of the array in error messages.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...] = ()
    path: str = "input"


@attrs.frozen(kw_only=True, eq=False)
class Function:
    """A pure function of an experiment.

    Attributes:
        call: The function. It is traced with the program's mesh, mesh rules, kernel selection, and compiler options.
        inputs: Returns the abstract arguments for a bucket: trees of `Array`, `jax.ShapeDtypeStruct`, and `Part`. A bucket
            identifies the shapes of a call: a batch for `train`, or a number of rows and a length for `decode`.
        outputs: Returns a tree prefix of `Part` and `Array` that defines the shardings of the results. None lets the compiler
            decide.
        donate: Positions of the donated arguments.
        differentiates: True if the function computes gradients. Otherwise, kernels without a backward pass are allowed.
        frozen: Paths of the parameters that the function returns unchanged, so it does not need their gradients.
        required_kernels: Names of the ops that must use the kernel that the config names. This applies to every op if the
            function differentiates. Other ops may fall back to a different kernel, and the fallback is reported.
        runs_once: Optimize for compile time instead of run time.
        takes_bucket: Pass the bucket to `call` as the last argument, which is static.
        takes_model: Pass the bound model to `call` as the first argument. Only for functions that a model declares.
        get_bucket: Returns the bucket for a batch of the experiment, for plans and explanations.
        place: Returns the shardings of the result, given the default shardings and the abstract result.
        describe: Description for display.
    """

    call: Callable[..., Any]
    inputs: Callable[[Any], tuple[Any, ...]] = lambda _: ()
    outputs: Callable[[Any], Any] | None = None
    donate: tuple[int, ...] = ()
    differentiates: bool = False
    frozen: Collection[str] = ()
    required_kernels: tuple[str, ...] = ()
    runs_once: bool = False
    takes_bucket: bool = False
    takes_model: bool = True
    get_bucket: Callable[[Mapping[str, Any]], Any] = lambda batch: batch
    place: Callable[[Any, Any], Any] = lambda shardings, _: shardings
    describe: str = ""


@runtime_checkable
class DeclaresModelFunctions(Protocol):
    """A model that declares functions other than its loss."""

    def functions(self) -> Mapping[str, Function]:
        """Return functions by name. This is called on the model with abstract arrays."""
        ...


def model_functions(functional: Functional) -> dict[str, Function]:
    """Return the functions that a model declares. They accept `ModelWeights` instead of the bound model."""
    model = functional.describe()
    return convert_functions(model.functions() if isinstance(model, DeclaresModelFunctions) else {}, functional)


def convert_functions(declared: Mapping[str, Function], functional: Functional) -> dict[str, Function]:
    """Convert functions of a bound model to functions of `ModelWeights`. Keep functions without `takes_model`."""
    return {n: _convert_function(f, functional) if f.takes_model else f for n, f in declared.items()}


def _convert_function(function: Function, functional: Functional) -> Function:
    def call(weights: ModelWeights, *inputs: object) -> Any:
        return function.call(functional.bind(weights.params, weights.variables), *inputs)

    return attrs.evolve(
        function,
        call=call,
        inputs=lambda bucket: (Part.WEIGHTS, *function.inputs(bucket)),
        donate=tuple(i + 1 for i in function.donate),
    )


def batch_inputs(batch: Mapping[str, Any]) -> dict[str, Array]:
    """Return the abstract arrays of a batch. Rows have the logical axis `batch`, and positions have `sequence`."""
    shapes = {name: global_shape(value) for name, value in batch.items()}
    return {n: Array(s, batch[n].dtype, batch_axes(s), f"input ({n})") for n, s in shapes.items()}


def global_shape(value: Any) -> tuple[int, ...]:
    """Return the global shape of a batch array. NumPy arrays contain only the rows of this process."""
    shape = tuple(value.shape)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) or not shape:
        return shape
    return (shape[0] * jax.process_count(), *shape[1:])


def batch_axes(shape: Sequence[int]) -> tuple[str | None, ...]:
    """Return the logical axes of a batch array."""
    return (*BATCH_AXES, *(None,) * len(shape))[: len(shape)]


def share_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trace and lower a function only once for calls with equal shapes.

    The compiler inlines the function, so the program does not change. Only call the result inside a trace.
    """
    return jax.jit(function)


def array_function(*, static: Sequence[int] = (), donate: Sequence[int] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a pure function of arrays, so that it is compiled for the devices of its arguments.

    Do not use it for computations of a model. An experiment declares those as a `Function`, which its program compiles with
    its mesh, rules, and kernels.

    Args:
        static: Positions of hashable arguments that are not arrays.
        donate: Positions of donated arguments.
    """
    return lambda call: jax.jit(call, static_argnums=tuple(static), donate_argnums=tuple(donate))
