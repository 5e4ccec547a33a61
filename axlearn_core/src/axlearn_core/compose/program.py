"""`Program`: an experiment composed for a set of devices. The trainer runs the same program that a plan analyzes."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from axlearn_core.config import Node, walk
from axlearn_core.contracts.capabilities import DeclaresBatches
from axlearn_core.contracts.experiment import get_experiment_name, get_input_config
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, counted
from axlearn_core.kernels.selection import KernelError, Selection
from axlearn_core.plugins.manager import host

SMALL_BATCH = 2**20
"""Maximum size, in bytes, of a batch for which one extra copy is faster than the Python calls that would avoid it."""

BatchShapes = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape and dtype of each array in a batch, by name."""


class Experiment(Protocol):
    """Root config that `compose` accepts."""

    @property
    def model(self) -> Node[Any]:
        """Config of the model."""
        ...

    @property
    def mesh(self) -> Mesh:
        """Mesh and mesh rules."""
        ...

    def functions(self, functional: Functional) -> Mapping[str, Function]:
        """Return pure functions by name. A trainer provides `init`, `weights`, `loss`, `train`, and `evaluate`."""
        ...


class Program(Compiler):
    """Functions of an experiment over sharded state, for one mesh.

    Attributes:
        config: The experiment.
        functional: The model as pure functions.
        trained: The model and its objective as pure functions.
        state: Abstract training state with shardings.
        weights_spec: Abstract `ModelWeights` of the model with shardings.
        trained_spec: Abstract `ModelWeights` of the model and its objective with shardings.
    """

    def __init__(self, config: Experiment, devices: Sequence[Any] | None = None, machine: Machine | None = None):
        devices = machines.local_devices(machine) if devices is None else devices
        self.config, batches = config, _batch_shapes(config)
        self.functional = functional = Functional.from_config(config.model)
        self.trained = trained = ModelAndObjective.from_config(config, functional)
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

    @contextlib.contextmanager
    def tracing(self, name: str, kernels: Selection | None = None) -> Iterator[None]:
        """See `Compiler.tracing`. The error about a kernel that the config names contains the path of the setting."""
        try:
            with super().tracing(name, kernels):
                yield
        except KernelError as error:
            settings = [path for path, value in walk(self.config) if path.endswith("kernel") and value == error.kernel]
            if error.kernel is None or not settings:
                raise
            raise error.with_paths(settings) from error

    def __repr__(self) -> str:
        name, mesh = get_experiment_name(self.config), self.layout.mesh
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        devices = counted(mesh.size, f"{mesh.devices.flat[0].device_kind} device")
        parameters = f"{self.functional.num_parameters:,} parameters on {devices}"
        return f"Program({', '.join([*([name] if name else []), parameters, *([axes] if axes else [])])})"

    def init(self, seed: int) -> Any:
        """Initialize the sharded training state for step 0."""
        return self.compile("init")(jax.random.key(seed))

    def begin(self, seed: int, state: Any) -> Any:
        """Start a run with the weights and the step from `state`, a new root key, and a new learner state.

        The model's weights are donated. Parts of the objective that start as copies of the model are copied again. The
        objective's other arrays are taken from `state`, or initialized if they are abstract there.
        """
        trained = self.trained
        weights = trained.select_model_weights(ModelWeights(state.params, state.variables))
        initial = self.compile("begin")(jax.random.key(seed), weights).replace(step=state.step)

        def keep_trained(new: Mapping[str, Any], old: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
            unchanged = {p for p in new if p not in model and p not in trained.copies and isinstance(old[p], jax.Array)}
            return {p: old[p] if p in unchanged else x for p, x in new.items()}

        if trained.objective is None:
            return initial
        return initial.replace(
            params=keep_trained(initial.params, state.params, weights.params),
            variables=keep_trained(initial.variables, state.variables, weights.variables),
        )

    def train_step(self, state: object, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """Run one training step. `state` is donated."""
        return self.compile("train", batch)(state, batch)

    def eval_step(self, state: object, batch: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Return the sums for one evaluation batch; see `axlearn_core.train.step.TrainingFunctions.evaluate`."""
        return self.compile("evaluate", batch)(state, batch)

    def weights(self, state: object) -> ModelWeights:
        """Return the weights for evaluation and generation: the moving average of the parameters, if there is one."""
        return self.function("weights").call(state)

    def model(self, state: object) -> Any:
        """Return the model with the weights from a state, as an `nnx.Module` in evaluation mode."""
        weights = self.weights(state)
        return self.functional.bind(weights.params, weights.variables)

    def put(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Convert this process's rows of a batch to global arrays on the mesh."""
        key = tuple((name, value.shape, type(value)) for name, value in batch.items())
        put = self._puts.get(key)
        if put is None:
            put = self._puts[key] = self._make_put(batch)
        return put(dict(batch))

    def _make_put(self, batch: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, jax.Array]]:
        """Return the function that `put` uses for batches with these shapes and array types."""
        shardings = {k: self._batch_sharding(k, v) for k, v in batch.items()}
        if jax.process_count() > 1:
            return lambda batch: {k: _global(shardings[k], v) for k, v in batch.items()}
        small = sum(v.nbytes for v in batch.values()) <= SMALL_BATCH
        if self.layout.mesh.size == 1 and small and all(isinstance(v, np.ndarray) for v in batch.values()):
            # A compiled function converts NumPy arrays in C++, in a sixth of the time that `device_put` takes.
            return jax.jit(lambda batch: batch, out_shardings=shardings)
        return lambda batch: jax.device_put(batch, shardings)

    def _batch_sharding(self, name: str, value: Any) -> NamedSharding:
        shape = global_shape(value)
        return self.layout.sharding(batch_axes(shape), shape, f"input ({name})")

    def model_flops(self, batch: Mapping[str, Any]) -> int:
        """Return the model FLOPs of one step. Attention counts in full, even if it is causal.

        This follows the convention of model FLOPs utilization (Chowdhery et al., 2022), which excludes recomputation. If every
        parameter is trained, the step counts as three forward passes. Gradients of frozen parameters do not count, and
        neither does the backward pass of a frozen model. See `axlearn_core.compose.flops.Gradients`.
        """
        specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
        return count_flops(self.function("loss").call, self.trained.specs, specs, trained=self.trained_marks)

    @property
    def trained_marks(self) -> tuple[ModelWeights, bool]:
        """Marks for the arguments of `loss`: True for the parameters that a training step updates."""
        frozen = set(self.function("train").frozen)
        specs = self.trained.specs
        return ModelWeights({p: p not in frozen for p in specs.params}, dict.fromkeys(specs.variables, False)), False

    def fingerprint(self, batch: Mapping[str, Any]) -> str:
        """Return a hash of the lowered training step. Equal fingerprints mean equal programs."""
        return hashlib.sha256(self.lower("train", batch).as_text().encode()).hexdigest()[:16]


def array_shardings(functional: Functional | ModelAndObjective, layout: Layout) -> dict[str, NamedSharding]:
    """Return the shardings of parameters and variables by path."""
    axes = {**functional.axes, **functional.variable_axes}
    specs = {**functional.abstract, **functional.variables}
    return {path: layout.sharding(axes[path], s.shape, f"model ({path})") for path, s in specs.items()}


def sharded_specs(functional: Functional | ModelAndObjective, shardings: Mapping[str, NamedSharding]) -> ModelWeights:
    """Return the abstract weights with shardings."""
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
            # A mesh axis that does not shard the batch spans processes, so several processes need the same rows.
            whole = multihost_utils.process_allgather(value, tiled=True)
            return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
    return jax.make_array_from_process_local_data(sharding, value)


def _batch_shapes(config: object) -> BatchShapes:
    """Return the batch arrays that the input declares, or an empty dict."""
    source = get_input_config(config)
    return source.batch_shapes() if isinstance(source, DeclaresBatches) else {}


def declared_batch(config: object) -> dict[str, jax.ShapeDtypeStruct]:
    """Return an abstract global batch of the shapes that the input declares. Empty if they depend on the data."""
    shapes = _batch_shapes(config)
    if not all(isinstance(size, int) for shape, _ in shapes.values() for size in shape):
        return {}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}


def _check_batch(shapes: BatchShapes, layout: Layout) -> None:
    """Check that batches with these shapes can be sharded."""
    for name, (shape, _) in shapes.items():
        layout.spec(batch_axes(shape), shape, f"input ({name})")


def find_layout_problem(config: Any, mesh: Mesh, devices: int, trained: ModelAndObjective | None = None) -> str | None:
    """Return the reason why parameters or batches cannot be sharded over a number of devices, or None if they can.

    Args:
        config: Experiment with a `model`, an `objective`, and an `input`.
        mesh: Mesh to shard them over.
        devices: Number of devices.
        trained: The model and the objective of the config, if they are already built.
    """
    try:
        if trained is None:
            trained = ModelAndObjective.from_config(config, Functional.from_config(config.model))
        layout = _lay_out(mesh, trained, devices)
        _check_batch(_batch_shapes(config), layout)
    except ConfigError as error:
        problem = error.problems[0]
        return f"{problem.path}: {problem.message}" + (f" ({problem.got})" if problem.got else "")
    return None


def _lay_out(mesh: Mesh, trained: ModelAndObjective, devices: int) -> Layout:
    """Return the layout of an abstract mesh. Raise `ConfigError` if it does not fit the parameters."""
    sizes = mesh.sizes(devices)
    layout = Layout(jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes)), mesh)
    axes = {**trained.axes, **trained.variable_axes}
    for path, array in {**trained.abstract, **trained.variables}.items():
        layout.spec(axes[path], array.shape, f"model ({path})")
    return layout


def check_program(config: Experiment, machine: Machine | None = None) -> ModelAndObjective:
    """Check an experiment as `compose` does, but without devices or arrays.

    Build the model and the learner abstractly, trace the loss of a batch, and shard parameters and batches over the mesh.

    Args:
        config: The experiment. An axis of -1 in its `mesh.shape` requires a machine.
        machine: Machine that defines the number of devices. If None, the mesh shape defines it.

    Returns:
        The model and its objective.

    Raises:
        ConfigError: If a module is invalid, if a logical axis has no rule, or if a dimension is not divisible by its mesh axes.
        RequestError: If the learner rejects the parameters.
    """
    functional = Functional.from_config(config.model)
    trained = ModelAndObjective.from_config(config, functional)
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
    """Compose an experiment for a set of devices: create the mesh, shard, select kernels, and prepare the functions.

    Args:
        config: Config that has been resolved for the machine and contains its mesh rule.
        devices: Devices to use (default: all JAX devices). To compile for hardware that is not present, pass the result of
            `axlearn_core.compose.devices.topology_devices`.
        machine: Machine that the devices belong to. If None, JAX's device kind identifies it.

    Raises:
        ConfigError: If the mesh does not fit the devices, if a logical axis has no rule, or if a dimension is not divisible by its
            mesh axes.
        RequestError: If the devices do not match `machine`.
    """
    return Program(config, devices, machine)
