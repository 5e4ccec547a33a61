"""What a program is made of: named pure functions, each with the arguments that it is compiled for."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import jax

from axlearn_core.compose.functional import Functional, ModelWeights

BATCH_AXES = ("batch", "sequence")


class Part(enum.Enum):
    """Stands for what a program already knows, among the abstract arguments and results of a function."""

    STATE = "the training state"
    WEIGHTS = "the model's parameters and variables"
    TRAINED = "the parameters and variables of the model and of its objective"
    KEY = "a random key"
    REPLICATED = "held whole by every device"


@attrs.frozen
class Array:
    """An abstract array, laid out by one logical axis name (or None) per dimension.

    Attributes:
        path: what it is called in errors.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...] = ()
    path: str = "input"


@attrs.frozen(kw_only=True, eq=False)
class Function:
    """One pure function of an experiment.

    Attributes:
        call: the function; traced under the program's mesh, mesh rules, kernel selection and compiler options.
        inputs: bucket -> its abstract arguments: trees of `Array`, `jax.ShapeDtypeStruct` and `Part`. A bucket tells
            the function's shapes apart: a batch for `train`, a number of rows and a length for `decode`.
        outputs: bucket -> a prefix of its results that says where they live, of `Part` and `Array`; None leaves it to the
            compiler.
        donate: the positions of the arguments whose buffers the results take over.
        differentiates: whether it needs gradients; where it does not, kernels without a backward pass may be chosen.
        required_kernels: the names of the ops whose kernel the config names for this very function: it has to serve. So it
            has for every op of a function that differentiates. Elsewhere another one steps in, and that is reported.
        runs_once: compiled fast rather than well.
        by_bucket: whether `call` takes the bucket too, as its last argument, which is static.
        of_model: of what a model declares, whether `call` takes the bound model first; otherwise it takes its inputs alone.
        bucket_of: a batch of the experiment -> the bucket that plans and explanations take.
        place: `(shardings, abstract result) -> shardings`, where some of the result is to live elsewhere.
        describe: what it does, for people.
    """

    call: Callable[..., Any]
    inputs: Callable[[Any], tuple[Any, ...]] = lambda _: ()
    outputs: Callable[[Any], Any] | None = None
    donate: tuple[int, ...] = ()
    differentiates: bool = False
    required_kernels: tuple[str, ...] = ()
    runs_once: bool = False
    by_bucket: bool = False
    of_model: bool = True
    bucket_of: Callable[[Mapping[str, Any]], Any] = lambda batch: batch
    place: Callable[[Any, Any], Any] = lambda shardings, _: shardings
    describe: str = ""


@runtime_checkable
class DeclaresModelFunctions(Protocol):
    """A model that computes more than its loss."""

    def functions(self) -> Mapping[str, Function]:
        """Functions by name, of the model with abstract arrays that this is called on."""
        ...


def model_functions(functional: Functional) -> dict[str, Function]:
    """The functions that a model declares, over its parameters and variables.

    A model's own functions take the bound model first; here they take `ModelWeights` in its place.
    """
    model = functional.describe()
    return over_weights(model.functions() if isinstance(model, DeclaresModelFunctions) else {}, functional)


def over_weights(declared: Mapping[str, Function], functional: Functional) -> dict[str, Function]:
    """Functions of a bound model as functions of its `ModelWeights`; those that are not `of_model` stay as they are."""
    return {n: _over_weights(f, functional) if f.of_model else f for n, f in declared.items()}


def _over_weights(function: Function, functional: Functional) -> Function:
    def call(weights: ModelWeights, *inputs: object) -> Any:
        return function.call(functional.bind(weights.params, weights.variables), *inputs)

    return attrs.evolve(
        function,
        call=call,
        inputs=lambda bucket: (Part.WEIGHTS, *function.inputs(bucket)),
        donate=tuple(i + 1 for i in function.donate),
    )


def batch_inputs(batch: Mapping[str, Any]) -> dict[str, Array]:
    """The abstract arrays of a batch: its rows split as the mesh rules split `batch`, its positions as `sequence`."""
    shapes = {name: global_shape(value) for name, value in batch.items()}
    return {n: Array(s, batch[n].dtype, batch_axes(s), f"input ({n})") for n, s in shapes.items()}


def global_shape(value: Any) -> tuple[int, ...]:
    """The shape of the whole batch of all processes: arrays that are not JAX's hold the rows of this process alone."""
    shape = tuple(value.shape)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) or not shape:
        return shape
    return (shape[0] * jax.process_count(), *shape[1:])


def batch_axes(shape: Sequence[int]) -> tuple[str | None, ...]:
    """The logical axes of an array of a batch."""
    return (*BATCH_AXES, *(None,) * len(shape))[: len(shape)]


def share_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a trace calls many times, and traces and lowers once for arguments of equal shapes.

    The compiler puts it in line, so the program is the same. To be called inside of a trace only, where it compiles nothing.
    """
    return jax.jit(function)


def array_function(*, static: Sequence[int] = (), donate: Sequence[int] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a pure function of arrays to be compiled for the devices of its arguments.

    What a model computes is not among these: an experiment declares it as a `Function`, which its program compiles
    under its mesh, rules and kernels.

    Args:
        static: positions of the arguments that are not arrays; hashable.
        donate: positions of the arguments whose buffers the result takes over.
    """
    return lambda call: jax.jit(call, static_argnums=tuple(static), donate_argnums=tuple(donate))
