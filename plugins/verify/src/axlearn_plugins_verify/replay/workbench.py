"""Compute the parts of one step: the outputs of its modules, its gradients, and the gradients of some of its documents."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import Function, ModelWeights, Part, Program, compose
from axlearn_core.compose.functions import Array, batch_inputs
from axlearn_core.config import Node, patch
from axlearn_core.config.node import get_fields
from axlearn_core.config.roles import StackRole
from axlearn_core.config.tree import walk
from axlearn_core.learn import Learner
from axlearn_core.learn.learner import global_norm
from axlearn_core.train.step import TrainingFunctions
from axlearn_plugins_tools.reporting.step_runner import HostBatch
from axlearn_plugins_verify.prove.module_calls import patched
from axlearn_plugins_verify.replay.probes import ProbeRecorder, Statistics, What, measure_parameters

_LAYERS = "layers"


@attrs.frozen(kw_only=True)
class Measure:
    """Loss and gradient statistics for a batch.

    Attributes:
        loss: Mean loss over the targets.
        norm: Norm of the gradients of the trained parameters.
        nonfinite: Number of non-finite values in these gradients.
    """

    loss: float
    norm: float
    nonfinite: int

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return bool(np.isfinite(self.loss)) and not self.nonfinite


class Workbench:
    """The weights and the key before a step, and functions that compute parts of it.

    Args:
        program: Program of the run, possibly with additional features.
        state: State before the step.
    """

    def __init__(self, program: Program, state: Any):
        self.program = program
        self.weights = ModelWeights(state.params, state.variables)
        self.key = jax.random.fold_in(jax.random.wrap_key_data(jax.device_get(state.rng)), jax.device_get(state.step))
        config: Any = program.config
        self.microbatches = config.learner.accumulate_steps if isinstance(config.learner, Learner.Config) else 1
        self._learner, self._training = _training_functions(program)
        frozen = set(program.function("train").frozen)
        self.trained = [path for path in program.trained.abstract if path not in frozen]
        program.functions["replay-gradients"] = Function(
            call=self._gradients,
            inputs=lambda batch: (Part.TRAINED, batch_inputs(batch), Part.KEY),
            outputs=lambda _: (Part.REPLICATED, Part.TRAINED),
            differentiates=True,
            describe="loss and gradients, without an update",
        )

    @cached_property
    def _tracer(self) -> "_Tracer":
        return _Tracer(without_stages(self.program), self.weights, self.key, self.microbatches)

    def measure(self, batch: HostBatch) -> Measure:
        """Compute the loss and the gradients of a batch, with the weights and the key for the step."""
        return self._compute_gradients(batch)[0]

    def trace(self, batch: HostBatch, what: What) -> list[Statistics]:
        """Measure the outputs of all module calls, or the gradients of the loss with respect to them.

        Returns:
            Statistics in the order of computation, one microbatch after another.
        """
        return self._tracer.trace(batch, what)

    def trace_parameters(self, batch: HostBatch) -> list[Statistics]:
        """Measure the gradients of the trained parameters, separately for each layer of a stack."""
        gradients = self._compute_gradients(batch)[1].params
        axes = self.program.trained.axes
        layers = {path: axes[path].index(_LAYERS) for path in self.trained if _LAYERS in axes[path]}
        return measure_parameters({path: gradients[path] for path in self.trained}, layers)

    def _compute_gradients(self, batch: HostBatch) -> tuple[Measure, ModelWeights]:
        device_batch = self.program.put(batch)
        function = self.program.compile("replay-gradients", device_batch)
        result, gradients = function(self.weights, device_batch, self.key)
        loss, norm, nonfinite = jax.device_get(result)
        return Measure(loss=float(loss), norm=float(norm), nonfinite=int(nonfinite)), gradients

    def _gradients(self, weights: ModelWeights, batch: Any, key: jax.Array) -> Any:
        key_of_step = key if self.program.trained.is_stateful else None
        variables = self.program.trained.begin_step(weights.variables)
        (loss, *_), grads = self._learner.value_and_grad(
            self._training.training_loss, weights.params, variables, batch, key_of_step
        )
        trained = {path: grads[path] for path in self.trained}
        nonfinite = sum(jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in trained.values())
        return (loss, global_norm(trained), nonfinite), ModelWeights(grads, weights.variables)


class _Tracer:
    """Measures the outputs of modules, or the gradients with respect to them, one microbatch at a time."""

    def __init__(self, program: Program, weights: ModelWeights, key: jax.Array, microbatches: int):
        self.program, self.key, self.microbatches = program, key, microbatches
        self.weights = jax.tree.map(lambda x, spec: jax.device_put(x, spec.sharding), weights, program.trained_spec)
        self._training = _training_functions(program)[1]
        self._recorders: dict[What, ProbeRecorder] = {}
        calls: dict[What, Any] = {"outputs": self._loss, "gradients": self._backward}
        for what, call in calls.items():
            program.functions[f"replay-{what}-of-modules"] = Function(
                call=call,
                inputs=lambda batch: (
                    Part.TRAINED, batch_inputs(batch), Part.KEY, Array((), jnp.int32, (), "microbatch")
                ),
                outputs=lambda _: Part.REPLICATED,
                differentiates=what == "gradients",
                describe=f"{what} of modules",
            )  # fmt: skip

    def trace(self, batch: HostBatch, what: What) -> list[Statistics]:
        rows = next((tuple(batch[name].shape[:2]) for name in ("segment_ids", "tokens") if name in batch), None)
        rows = rows or (len(next(iter(batch.values()))),)
        rows = (rows[0] // self.microbatches, *rows[1:])
        program, device_batch = self.program, self.program.put(batch)
        if what not in self._recorders:
            self._recorders[what] = ProbeRecorder(program.functional.describe(), rows, what, program.layout.mesh)
        recorder = self._recorders[what]
        with patched(recorder):
            function = program.compile(f"replay-{what}-of-modules", device_batch)
        measured = []
        for index in range(self.microbatches):
            jax.block_until_ready(function(self.weights, device_batch, self.key, np.int32(index)))
            measured += [attrs.evolve(s, microbatch=index) for s in recorder.statistics()]
        return measured

    def _backward(self, weights: ModelWeights, batch: Any, key: jax.Array, index: jax.Array) -> jax.Array:
        def loss(params: Any) -> jax.Array:
            return self._loss(ModelWeights(params, weights.variables), batch, key, index)

        value, gradients = jax.value_and_grad(loss)(weights.params)
        return value + 0 * global_norm(gradients)  # so that XLA keeps the whole computation

    def _loss(self, weights: ModelWeights, batch: Mapping[str, Any], key: jax.Array, index: jax.Array) -> jax.Array:
        parts, key_of_step = self.microbatches, key if self.program.trained.is_stateful else None
        if parts > 1:
            batch = {
                name: jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)[index]
                for name, x in batch.items()
            }
            key_of_step = None if key_of_step is None else jax.random.fold_in(key_of_step, index)
        variables = self.program.trained.begin_step(weights.variables)
        return self._training.training_loss(weights.params, variables, batch, key_of_step)[0]


def without_stages(program: Program) -> Program:
    """Return the program without pipeline stages.

    Layers of different stages run at the same time, so they have no order. The devices of the stages move to the `fsdp` axis. A
    stack that is split into stages is replaced with the plain stack that computes the same function.
    """
    config: Any = program.config
    plain = {
        path: _as_base(value, base)
        for path, value in walk(config)
        if isinstance(value, StackRole) and isinstance(value, Node) and (base := value.computes_like) is not None
    }
    shape = {axis: size for axis, size in program.layout.mesh.shape.items() if size > 1}
    stages = shape.pop("pipeline", 1)
    if not plain and stages == 1:
        return program
    shape["fsdp"] = shape.get("fsdp", 1) * stages
    changed: Any = patch(config, {**plain, "mesh.shape": shape})
    return compose(changed, list(program.layout.mesh.devices.flat))


def _as_base(value: Any, base: Any) -> Any:
    return base(
        **{field: child for field, child in get_fields(value).items() if field in {a.name for a in attrs.fields(base)}}
    )


def _training_functions(program: Program) -> tuple[Any, TrainingFunctions]:
    config: Any = program.config
    learner = config.learner.build(max_steps=config.max_steps, axes=program.trained.axes)
    return learner, TrainingFunctions(program.functional, learner, program.trained)
