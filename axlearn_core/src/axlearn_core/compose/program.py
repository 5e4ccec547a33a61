"""A `Program`: one config made ready for one set of devices. The trainer runs the very program that a plan analyses."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from axlearn_core.compose import devices as machines
from axlearn_core.compose.flops import count_flops
from axlearn_core.compose.functional import Functional
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.config import Node
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, Problem
from axlearn_core.kernels import selection
from axlearn_core.nn import sharding as nn_sharding
from axlearn_core.plugins.manager import host

BATCH_AXES = ("batch", "sequence")


@attrs.frozen(eq=False)
class Steps:
    """The pure functions of an experiment over the state and a batch.

    Attributes:
        init: `(key) -> state`.
        train: `(state, batch) -> (state, scalars)`.
        evaluate: `(state, batch) -> scalars`.
        loss: `(params, batch) -> (loss, summaries)`, for counting FLOPs.
        model_params: `(state) -> params` to evaluate and export with: their moving average where there is one.
        begin: `(key, params) -> (rng, learner state)`, for a run that begins with these parameters.
        place: `(shardings, abstract state) -> shardings`, where some of it is to live elsewhere.
    """

    init: Callable[[jax.Array], Any]
    train: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], dict[str, jax.Array]]
    loss: Callable[[Any, Any], Any]
    model_params: Callable[[Any], Any]
    begin: Callable[[jax.Array, Any], tuple[Any, Any]]
    place: Callable[[Any, Any], Any] = lambda places, state: places


class Experiment(Protocol):
    """What `compose` needs of a root config."""

    @property
    def model(self) -> Node[Any]:
        """The model."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The mesh and its rules."""
        ...

    def steps(self, functional: Functional) -> Steps:
        """The pure functions."""
        ...


class Program:
    """Compiled functions over sharded state, for one mesh.

    Attributes:
        target: what is known of the hardware; None where no plugin knows it.
        functional: the model as pure functions.
        layout: the mesh and the logical axes resolved on it.
        state: the abstract training state with its shardings.
    """

    def __init__(self, config: Experiment, devices: Sequence[Any] | None = None, machine: Machine | None = None):
        devices = machines.here(machine) if devices is None else devices
        self.config = config
        self.functional = Functional.of(config.model)
        self.layout = Layout(make_mesh(config.mesh, devices, machine.domains if machine else 1), config.mesh)
        _check_batch(config, self.layout)
        self.target = machine.target if machine else host().target(devices[0].device_kind)
        self.kernels = selection.Selection(
            platform=self.target.platform if self.target else devices[0].platform,
            target=self.target.name if self.target else "",
        )
        self.steps = config.steps(self.functional)
        abstract, axes = self.functional.abstract, self.functional.axes
        shardings = {p: self.layout.sharding(axes[p], s.shape, f"model ({p})") for p, s in abstract.items()}
        state = jax.eval_shape(self.steps.init, jax.random.key(0))
        places = self.steps.place(self.layout.place_like(state, shardings, abstract), state)
        self.state = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), state, places)
        # LLVM's third level takes three times as long to compile what runs once, and as fast at the first.
        quick = {"xla_backend_optimization_level": 1} if devices[0].platform == "cpu" else None
        self._init = jax.jit(self._traced(self.steps.init), out_shardings=places, compiler_options=quick)
        self._train = jax.jit(
            self._traced(self.steps.train), donate_argnums=0, out_shardings=(places, self.layout.replicated)
        )
        self._evaluate = jax.jit(
            self._traced(self.steps.evaluate),
            out_shardings=self.layout.replicated,
            compiler_options=self.compiler_options or None,
        )
        self._compiled: dict[Any, Any] = {}

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for the steps: the target's, and over them the config's."""
        return {**(self.target.compiler_options if self.target else {}), **self.config.mesh.compiler_options}

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, traced under this program's mesh, rules and kernel selection."""

        def run(*args: Any) -> Any:
            with nn_sharding.logical_rules(self.layout.mesh, self.layout.rules), selection.use(self.kernels):
                return function(*args)

        return run

    def init(self, seed: int) -> Any:
        """The state of step 0, sharded."""
        return self._init(jax.random.key(seed))

    def begin(self, seed: int, state: Any) -> Any:
        """`state` with its weights and step, and otherwise as a run begins: a new root key, a new learner's state."""
        places = jax.tree.map(lambda s: s.sharding, (self.state.rng, self.state.learner))
        begin = jax.jit(self._traced(self.steps.begin), out_shardings=places)
        rng, learner = begin(jax.random.key(seed), state.params)
        return state.replace(rng=rng, learner=learner)

    def compile_train(self, batch: Mapping[str, Any], **options: Any) -> Any:
        """The compiled training step for batches of these shapes; kept. `options` are XLA's, under `compiler_options`."""
        key = (*((k, v.shape, str(v.dtype)) for k, v in sorted(batch.items())), *sorted(options.items()))
        if key not in self._compiled:
            lowered = self.lower(batch)
            try:
                self._compiled[key] = lowered.compile(compiler_options={**options, **self.compiler_options} or None)
            except jax.errors.JaxRuntimeError as error:
                _check_options(self.config.mesh.compiler_options, str(error))
                raise
        return self._compiled[key]

    def trace(self, batch: Mapping[str, Any]) -> Any:
        """The training step traced for global batches of these shapes: its jaxpr, and the choice of kernels."""
        specs = {
            k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=self._batch_sharding(k, v)) for k, v in batch.items()
        }
        return self._train.trace(self.state, specs)

    def lower(self, batch: Mapping[str, Any]) -> Any:
        """The training step lowered for global batches of these shapes."""
        platform = self.layout.mesh.devices.flat[0].platform
        return self.trace(batch).lower(lowering_platforms=("cuda" if platform == "gpu" else str(platform),))

    def train_step(self, state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """One training step; `state` is donated."""
        return self.compile_train(batch)(state, batch)

    def eval_step(self, state: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The scalars of one evaluation batch."""
        return self._evaluate(state, batch)

    def model(self, state: Any) -> Any:
        """The model with the parameters of a state, as an `nnx.Module`."""
        return self.functional.bind(self.steps.model_params(state))

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """This process's rows of a batch, as global arrays on the mesh."""
        return {k: _global(self._batch_sharding(k, v), v) for k, v in batch.items()}

    def _batch_sharding(self, name: str, value: Any) -> NamedSharding:
        shape = tuple(value.shape)
        if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
            shape = (shape[0] * jax.process_count(), *shape[1:]) if shape else shape
        return self.layout.sharding(_batch_axes(shape), shape, f"input ({name})")

    def model_flops(self, batch: Mapping[str, Any]) -> int:
        """FLOPs of the mathematics of one step: three times the forward pass, with full (not causal-halved) attention.

        The convention of model FLOPs utilisation (Chowdhery et al., 2022): recomputation does not count.
        """
        specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
        return 3 * count_flops(self.steps.loss, self.functional.abstract, specs)

    def fingerprint(self, batch: Mapping[str, Any]) -> str:
        """A hash of the lowered training step: equal fingerprints compute the same."""
        return hashlib.sha256(self.lower(batch).as_text().encode()).hexdigest()[:16]


def _check_options(options: Mapping[str, Any], refusal: str) -> None:
    """Raises `ConfigError` where XLA's `refusal` to compile is about one of the config's options for it."""
    for name, value in options.items():
        if refusal.startswith("INVALID_ARGUMENT: ") and name in re.findall(r"\w+", refusal):
            said = refusal.removeprefix("INVALID_ARGUMENT: ")
            raise ConfigError(Problem(path=f"mesh.compiler_options.{name}", message=said, got=repr(value)))


def _global(sharding: NamedSharding, value: Any) -> jax.Array:
    if jax.process_count() > 1 and value.ndim:
        shape = (value.shape[0] * jax.process_count(), *value.shape[1:])
        held = {(index[0].start, d.process_index) for d, index in sharding.devices_indices_map(shape).items()}
        if len(held) > len({start for start, _ in held}):
            # An axis that does not split the batch goes across processes: several need the same rows.
            whole = multihost_utils.process_allgather(value, tiled=True)
            return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
    return jax.make_array_from_process_local_data(sharding, value)


def _batch_axes(shape: Sequence[int]) -> tuple[str | None, ...]:
    return (*BATCH_AXES, *(None,) * len(shape))[: len(shape)]


def _check_batch(config: Any, layout: Layout) -> None:
    """Where the input says what its batches look like, checks that they can be split, before there is one."""
    told = getattr(getattr(config, "input", None), "batch_shapes", dict)()
    for name, (shape, _) in told.items():
        layout.spec(_batch_axes(shape), shape, f"input ({name})")


def check_layout(config: Experiment, machine: Machine | None = None) -> None:
    """Checks that parameters and batches can be split over the mesh that the config asks for, without any devices.

    Args:
        config: an axis of -1 in its `mesh.shape` counts where there is a machine.
        machine: how many devices there are; otherwise as many as the shape says.

    Raises:
        ConfigError: a logical axis has no rule, or a dimension that its mesh axes do not divide.
    """
    sizes = config.mesh.sizes(machine.devices if machine else math.prod(map(abs, config.mesh.shape.values())))
    layout = Layout(jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)), config.mesh)
    model = Functional.of(config.model)
    for path, array in model.abstract.items():
        layout.spec(model.axes[path], array.shape, f"model ({path})")
    _check_batch(config, layout)


def compose(config: Experiment, devices: Sequence[Any] | None = None, *, machine: Machine | None = None) -> Program:
    """Makes `config` ready for `devices` (by default all that JAX sees): mesh, sharding, kernels, step functions.

    Args:
        config: resolved for the machine, whose mesh rule it holds.
        devices: of `machine`; `axlearn_core.compose.devices.absent` has those that are not here.
        machine: what the devices are. Without it they are known by what JAX says of them.

    Raises:
        ConfigError: the mesh does not fit the devices, or a logical axis has no rule or does not divide.
        RequestError: `machine` is not what is here.
    """
    return Program(config, devices, machine)
