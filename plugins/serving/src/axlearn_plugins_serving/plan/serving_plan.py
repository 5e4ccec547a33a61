"""Plan a server on a machine: its memory, cache capacity and shortest step times."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.config import Node, find, patch
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.kernels.selection import Choice
from axlearn_core.nn.layer import Layer
from axlearn_plugins_plan.compilation import disable_compilation_cache
from axlearn_plugins_plan.memory import capacity
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import check_decoder, fit_config
from axlearn_plugins_serving.plan.steps import StepPlan, Steps
from axlearn_plugins_serving.programs import check_absent
from axlearn_plugins_serving.runner import ModelRunner


@attrs.frozen(kw_only=True)
class ServingPlan:
    """The plan of a server on a machine. Bytes are per device.

    Attributes:
        weights: Bytes of the weights, in the form that steps use.
        cache: Bytes of the cache, with the number of blocks that the config sets.
        tables: Bytes of the sampling tables.
        token_bytes: Bytes of the cache per token.
        states: Bytes of the recurrent states of running requests, and of the saved ones.
        state_bytes: Bytes of the recurrent states of a request.
        capacity: Bytes of the device's memory; None if unknown.
        context: Assumed number of cached tokens per request: half of the maximum.
        single: Step with one request.
        full: Step with the maximum number of running requests.
        mixed: Step with the maximum number of running requests and as many prompt tokens as fit.
        layers_compiled: Numbers of layers in the compiled programs; None if all layers were compiled.
    """

    title: str
    machine: Machine
    runner: ModelRunner.Config
    mesh: dict[str, int]
    parameters: int
    dtype: str
    blocks: int
    weights: int
    cache: int
    tables: int
    token_bytes: float
    states: int
    state_bytes: float
    capacity: int | None
    context: int
    single: StepPlan
    full: StepPlan
    mixed: StepPlan
    layers: int
    layers_compiled: tuple[int, ...] | None
    kernels: tuple[Choice, ...]
    notes: tuple[str, ...]
    compile_seconds: float

    @property
    def steps(self) -> Sequence[StepPlan]:
        """All compiled steps."""
        return self.single, self.full, self.mixed

    @property
    def working_bytes(self) -> float:
        """Bytes of the largest step's temporaries and program."""
        return max(s.compiled.temporaries + s.compiled.code for s in self.steps)

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.weights + self.cache + self.states + self.tables + self.working_bytes

    @property
    def fits(self) -> bool:
        """Whether the server fits.

        True if the capacity is unknown and the compiler did not run out of memory.
        """
        if any(step.compiled.out_of_memory for step in self.steps):
            return False
        return self.capacity is None or self.total <= self.capacity

    @property
    def cache_tokens(self) -> int:
        """Capacity of the config's cache, in tokens."""
        return self.blocks * self.runner.block_size

    @property
    def most_tokens(self) -> int | None:
        """Capacity, in tokens, of a cache that uses all remaining memory; None if unknown."""
        if self.capacity is None or not self.token_bytes:
            return None
        room = self.capacity - self.weights - self.states - self.tables - self.working_bytes
        size = self.token_bytes * self.runner.block_size
        return max(0, int(room // size)) * self.runner.block_size


def plan_model(
    model: Node[Any],
    machine: Machine,
    *,
    title: str,
    config: ServingEngine.Config | None = None,
    mesh: Mesh | None = None,
    notes: Sequence[str] = (),
    export: Path | None = None,
) -> ServingPlan:
    """Compile a server's steps for a machine and analyze the compiled programs.

    Args:
        model: Config of a `CausalLM`. Its `param_dtype` is the dtype of the weights.
        machine: Machine to plan for. Its devices need not be present.
        title: Name of the model.
        config: Config of the engine.
        mesh: Layout of the devices. By default, all devices split each matrix multiplication (`tensor`).
        notes: Notes to add to the plan.
        export: New directory for the programs of all shapes, which are compiled with all layers. If it is None, no programs are
            written.

    Raises:
        RequestError: If the model does not generate tokens, the directory exists, or no installed compiler supports the
            machine.
        ConfigError: If the number of heads or the width is not divisible by the number of devices.
    """
    check_decoder(model)
    check_absent(export)
    config = fit_config(config or ServingEngine.Config(), model)
    runner = config.runner
    if not isinstance(runner, ModelRunner.Config):
        raise RequestError(f"a {type(runner).__qualname__} cannot be planned\n    expected: model-runner")
    if config.tensor_parallel not in (None, machine.devices):
        raise RequestError(
            "a plan covers one replica, whose devices split each matrix multiplication\n"
            f"    got: serving.tensor_parallel={config.tensor_parallel}, and {machine.devices} devices of {machine.name}\n"
            "    fix: remove one of them, or name a target with as many devices"
        )
    started = time.perf_counter()
    steps = Steps(runner, model, machine, mesh or tensor_parallel(machine))
    context = max(1, runner.max_context // 2)
    plain = [b for b in steps.buckets if not b.chunks]
    single = steps.plan(plain[0], 1, 0, context)
    full = steps.plan(plain[-1], runner.max_rows, 0, context) if len(plain) > 1 else single
    largest = max(steps.buckets, key=lambda b: b.tokens)
    mixed = steps.plan(largest, min(runner.max_rows, largest.rows), largest.chunks * largest.chunk, context)
    if export is not None:
        with disable_compilation_cache():
            steps.program.export_all(export)
    counts = find(model, "decoder.num_layers").values()
    return ServingPlan(
        title=title,
        machine=machine,
        runner=runner,
        mesh={a: n for a, n in steps.program.layout.mesh.shape.items() if n > 1},
        parameters=steps.program.functional.num_parameters,
        dtype=steps.dtype,
        blocks=steps.blocks,
        weights=steps.weights,
        cache=round(steps.token_bytes * steps.blocks * runner.block_size),
        tables=steps.tables,
        token_bytes=steps.token_bytes,
        states=steps.states,
        state_bytes=steps.state_bytes,
        capacity=capacity(machine),
        context=context,
        single=single,
        full=full,
        mixed=mixed,
        layers=next(iter(counts), 0),
        layers_compiled=steps.layers_compiled,
        kernels=steps.choices(),
        notes=(*notes, *steps.program.notes()),
        compile_seconds=time.perf_counter() - started,
    )


def tensor_parallel(machine: Machine) -> Mesh:
    """Return a mesh in which all devices split each matrix multiplication."""
    return Mesh(shape={"tensor": machine.devices} if machine.devices > 1 else {})


def cast_to_compute_dtype(model: Node[Any]) -> tuple[Node[Any], tuple[str, ...]]:
    """Return the config with weights in the compute dtype, and a note if it changed.

    Training keeps weights in float32 even if the model computes in bfloat16. Exports for serving are in bfloat16.
    """
    if not isinstance(model, Layer.Config):
        return model, ()
    stored, computed = model.param_dtype, model.dtype
    if stored is None or computed is None or stored == computed:
        return model, ()
    note = f"weights are assumed to be in {computed}, as in exports; training keeps them in {stored}"
    return patch(model, {"param_dtype": computed}), (note,)
