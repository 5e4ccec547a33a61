"""A `Program`: one config made ready for one set of devices. The trainer runs the very program that a plan analyses."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from axlearn_core.compose import devices as machines
from axlearn_core.compose.compiler import Compiler
from axlearn_core.compose.flops import count_flops
from axlearn_core.compose.functional import Functional, ModelWeights
from axlearn_core.compose.functions import Function, Part, batch_axes, global_shape
from axlearn_core.compose.layout import Layout, make_mesh
from axlearn_core.compose.objective import ModelAndObjective
from axlearn_core.config import Node
from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.contracts.experiment import input_of
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.manager import host

SMALL_BATCH = 2**20
"""Bytes up to which a batch for one device is copied once more, since that takes less time than calls in Python."""

BatchShapes = Mapping[str, tuple[tuple[int, ...], Any]]
"""Name -> (shape, dtype) of each array of a batch."""


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

    def functions(self, functional: Functional) -> Mapping[str, Function]:
        """The pure functions by name. A trainer has `init`, `weights`, `loss`, `train` and `evaluate`."""
        ...


class Program(Compiler):
    """The functions of an experiment over sharded state, for one mesh.

    Attributes:
        config: the experiment.
        functional: the model as pure functions.
        trained: the model and its objective as pure functions.
        state: the abstract training state with its shardings.
        weights_spec: the abstract `ModelWeights` of the model, with theirs.
        trained_spec: those of the model and its objective.
    """

    def __init__(self, config: Experiment, devices: Sequence[Any] | None = None, machine: Machine | None = None):
        devices = machines.local_devices(machine) if devices is None else devices
        self.config, batches = config, _batch_shapes(config)
        self.functional = functional = Functional.of(config.model)
        self.trained = trained = ModelAndObjective.of(config, functional)
        layout = Layout(make_mesh(config.mesh, devices, machine.domains if machine else 1), config.mesh)
        _check_batch(batches, layout)
        target = machine.target if machine else host().target(devices[0].device_kind)
        functions = config.functions(functional)
        shardings = array_shardings(trained, layout)
        state = jax.eval_shape(functions["init"].call, jax.random.key(0))
        places = layout.place_like(state, shardings, {**trained.abstract, **trained.variables})
        self.state = _with_shardings(state, functions["init"].place(places, state))
        self.weights_spec = sharded_specs(functional, shardings)
        self.trained_spec = sharded_specs(trained, shardings)
        self._puts: dict[Any, Callable[[dict[str, Any]], dict[str, jax.Array]]] = {}
        parts = {Part.STATE: self.state, Part.WEIGHTS: self.weights_spec, Part.TRAINED: self.trained_spec}
        super().__init__(functions, layout, config.mesh, target, parts)

    def init(self, seed: int) -> Any:
        """The state of step 0, sharded."""
        return self.compile("init")(jax.random.key(seed))

    def begin(self, seed: int, state: Any) -> Any:
        """`state` with its weights and step, and otherwise as a run begins: a new root key, a new learner's state.

        The model's weights are donated. Of the objective, what begins as a copy of the model is copied anew; the rest stays
        as it is in `state`, and is initialised where `state` has it abstract.
        """
        trained = self.trained
        weights = trained.of_model(ModelWeights(state.params, state.variables))
        begun = self.compile("begin")(jax.random.key(seed), weights).replace(step=state.step)

        def keep_trained(new: Mapping[str, Any], old: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
            own = {p for p in new if p not in model and p not in trained.copies and isinstance(old[p], jax.Array)}
            return {p: old[p] if p in own else x for p, x in new.items()}

        if trained.objective is None:
            return begun
        return begun.replace(
            params=keep_trained(begun.params, state.params, weights.params),
            variables=keep_trained(begun.variables, state.variables, weights.variables),
        )

    def train_step(self, state: object, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """One training step; `state` is donated."""
        return self.compile("train", batch)(state, batch)

    def eval_step(self, state: object, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        """The sums of one evaluation batch; see `axlearn_core.train.step.TrainingFunctions.evaluate`."""
        return self.compile("evaluate", batch)(state, batch)

    def weights(self, state: object) -> ModelWeights:
        """What of a state to evaluate and generate with: a moving average of the parameters where there is one."""
        return self.function("weights").call(state)

    def model(self, state: object) -> Any:
        """The model with the weights of a state, as an `nnx.Module` in evaluation."""
        weights = self.weights(state)
        return self.functional.bind(weights.params, weights.variables)

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """This process's rows of a batch, as global arrays on the mesh."""
        key = tuple((name, value.shape, type(value)) for name, value in batch.items())
        put = self._puts.get(key)
        if put is None:
            put = self._puts[key] = self._make_put(batch)
        return put(dict(batch))

    def _make_put(self, batch: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, jax.Array]]:
        """What `put` calls for batches of these shapes, and of NumPy's arrays or of JAX's as here."""
        shardings = {k: self._batch_sharding(k, v) for k, v in batch.items()}
        if jax.process_count() > 1:
            return lambda batch: {k: _global(shardings[k], v) for k, v in batch.items()}
        small = sum(v.nbytes for v in batch.values()) <= SMALL_BATCH
        if self.layout.mesh.size == 1 and small and all(isinstance(v, np.ndarray) for v in batch.values()):
            # A compiled function takes NumPy's arrays without a step in Python, in a sixth of the time of `device_put`.
            return jax.jit(lambda batch: batch, out_shardings=shardings)
        return lambda batch: jax.device_put(batch, shardings)

    def _batch_sharding(self, name: str, value: Any) -> NamedSharding:
        shape = global_shape(value)
        return self.layout.sharding(batch_axes(shape), shape, f"input ({name})")

    def model_flops(self, batch: Mapping[str, Any]) -> int:
        """FLOPs of the mathematics of one step: three times the forward pass, with full (not causal-halved) attention.

        The convention of model FLOPs utilisation (Chowdhery et al., 2022): recomputation does not count. The frozen models
        of an objective count as if they were trained.
        """
        specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
        return 3 * count_flops(self.function("loss").call, self.trained.specs, specs)

    def fingerprint(self, batch: Mapping[str, Any]) -> str:
        """A hash of the lowered training step: equal fingerprints compute the same."""
        return hashlib.sha256(self.lower("train", batch).as_text().encode()).hexdigest()[:16]


def array_shardings(functional: Functional | ModelAndObjective, layout: Layout) -> dict[str, NamedSharding]:
    """Path -> where it lives, of parameters and variables."""
    axes = {**functional.axes, **functional.variable_axes}
    specs = {**functional.abstract, **functional.variables}
    return {path: layout.sharding(axes[path], s.shape, f"model ({path})") for path, s in specs.items()}


def sharded_specs(functional: Functional | ModelAndObjective, shardings: Mapping[str, NamedSharding]) -> ModelWeights:
    """The abstract weights, with where they live."""
    return ModelWeights(
        *(
            _with_shardings(specs, {path: shardings[path] for path in specs})
            for specs in (functional.abstract, functional.variables)
        )
    )


def _with_shardings(tree: object, shardings: object) -> Any:
    return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), tree, shardings)


def _global(sharding: NamedSharding, value: Any) -> jax.Array:
    if jax.process_count() > 1 and value.ndim:
        shape = (value.shape[0] * jax.process_count(), *value.shape[1:])
        shards = {(index[0].start, d.process_index) for d, index in sharding.devices_indices_map(shape).items()}
        if len(shards) > len({start for start, _ in shards}):
            # An axis that does not split the batch goes across processes: several need the same rows.
            whole = multihost_utils.process_allgather(value, tiled=True)
            return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
    return jax.make_array_from_process_local_data(sharding, value)


def _batch_shapes(config: object) -> BatchShapes:
    """The arrays of a batch as the input declares them; empty if it declares none."""
    source = input_of(config)
    return source.batch_shapes() if isinstance(source, DeclaresBatches) else {}


def _check_batch(shapes: BatchShapes, layout: Layout) -> None:
    """Checks that batches of these shapes can be split."""
    for name, (shape, _) in shapes.items():
        layout.spec(batch_axes(shape), shape, f"input ({name})")


def refusal_of_layout(config: Any, mesh: Mesh, devices: int) -> str | None:
    """The reason why parameters and batches cannot be laid over so many devices; None if they can.

    Args:
        config: has the `model`, the `objective` and the `input` of an experiment.
        mesh: to lay them over.
        devices: how many.
    """
    try:
        layout = _lay_out(mesh, ModelAndObjective.of(config, Functional.of(config.model)), devices)
        _check_batch(_batch_shapes(config), layout)
    except ConfigError as error:
        problem = error.problems[0]
        return f"{problem.path}: {problem.message}" + (f" ({problem.got})" if problem.got else "")
    return None


def _lay_out(mesh: Mesh, trained: ModelAndObjective, devices: int) -> Layout:
    """The layout of an abstract mesh; raises `ConfigError` if it does not fit the parameters."""
    sizes = mesh.sizes(devices)
    layout = Layout(jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)), mesh)
    axes = {**trained.axes, **trained.variable_axes}
    for path, array in {**trained.abstract, **trained.variables}.items():
        layout.spec(axes[path], array.shape, f"model ({path})")
    return layout


def check_program(config: Experiment, machine: Machine | None = None) -> ModelAndObjective:
    """Checks what `compose` would refuse, without any devices or arrays: builds the model and the learner abstractly, traces
    the loss of a batch, and lays parameters and batches over the mesh that the config asks for.

    Args:
        config: an axis of -1 in its `mesh.shape` counts where there is a machine.
        machine: how many devices there are; otherwise as many as the shape says.

    Returns:
        The model and its objective.

    Raises:
        ConfigError: a part that cannot stand in a model, a logical axis without a rule, or a dimension that its mesh axes do
            not divide.
        RequestError: what the learner refuses.
    """
    functional = Functional.of(config.model)
    trained = ModelAndObjective.of(config, functional)
    functions = config.functions(functional)
    jax.eval_shape(functions["init"].call, jax.random.key(0))
    shapes = _batch_shapes(config)
    batch = {name: jax.ShapeDtypeStruct(*spec) for name, spec in shapes.items()}
    if batch and "loss" in functions:
        jax.eval_shape(functions["loss"].call, trained.specs, batch)
    if config.mesh.shape or machine:
        devices = machine.devices if machine else math.prod(map(abs, config.mesh.shape.values()))
        _check_batch(shapes, _lay_out(config.mesh, trained, devices))
    return trained


def compose(config: Experiment, devices: Sequence[Any] | None = None, *, machine: Machine | None = None) -> Program:
    """Makes `config` ready for `devices` (by default all that JAX sees): mesh, sharding, kernels, step functions.

    Args:
        config: resolved for the machine, whose mesh rule it holds.
        devices: of `machine`; `axlearn_core.compose.devices.topology_devices` describes hardware to compile for.
        machine: what the devices are. Without it they are known by what JAX says of them.

    Raises:
        ConfigError: the mesh does not fit the devices, or a logical axis has no rule or does not divide.
        RequestError: `machine` is not what is here.
    """
    return Program(config, devices, machine)
