"""What a machine can serve of a model: whether it fits, how many tokens its cache holds, how fast a step can be at most."""

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
from axlearn_plugins_plan.compilation import uncached
from axlearn_plugins_plan.memory import capacity
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import check_decoder, fit_config
from axlearn_plugins_serving.plan.steps import StepPlan, Steps
from axlearn_plugins_serving.programs import check_new
from axlearn_plugins_serving.runner import ModelRunner


@attrs.frozen(kw_only=True)
class ServingPlan:
    """What is known of serving one model on one machine. Bytes are of one device.

    Attributes:
        weights: as steps take them.
        cache: of the blocks that the config asks for.
        tables: of the requests' options.
        token_bytes: of the cache, of one token.
        capacity: of the device; None where it is not known.
        context: tokens that each request is taken to have in the cache: half of the longest.
        alone: a step of one request.
        full: a step of all requests that run at one time.
        mixed: a step of all of them beside as many tokens of prompts as there is room for.
        layers_compiled: how many layers the compiled programs have; None where it is all of them.
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
    capacity: int | None
    context: int
    alone: StepPlan
    full: StepPlan
    mixed: StepPlan
    layers: int
    layers_compiled: tuple[int, ...] | None
    kernels: tuple[Choice, ...]
    notes: tuple[str, ...]
    compile_seconds: float

    @property
    def steps(self) -> Sequence[StepPlan]:
        """All that were compiled."""
        return self.alone, self.full, self.mixed

    @property
    def working(self) -> float:
        """What the largest step needs in addition to weights and cache: temporaries and the program itself."""
        return max(s.compiled.temporaries + s.compiled.code for s in self.steps)

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.cache + self.tables + self.working

    @property
    def fits(self) -> bool:
        """Whether it does; where the capacity is not known, nothing says that it does not."""
        if any(step.compiled.refused for step in self.steps):
            return False
        return self.capacity is None or self.total <= self.capacity

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache of the config holds."""
        return self.blocks * self.runner.block_size

    @property
    def most_tokens(self) -> int | None:
        """Tokens that a cache holds that takes all the memory that is left; None where the capacity is not known."""
        if self.capacity is None or not self.token_bytes:
            return None
        room = self.capacity - self.weights - self.tables - self.working
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
    """Compiles the steps of a server for a machine, and reads what the compiler made.

    Args:
        model: the config of a `CausalLM`; its `param_dtype` is what the weights are held in.
        machine: whose devices need not be here.
        title: what the model is called.
        config: of the engine.
        mesh: how the devices are laid out; by default all of them share each product (`tensor`).
        notes: for people.
        export: a new directory for the programs of all shapes, which are compiled with all layers; None writes none.

    Raises:
        RequestError: the model is not a decoder of tokens, the directory exists, or nothing can compile for the machine.
        ConfigError: the devices do not divide the heads or the width.
    """
    check_decoder(model)
    check_new(export)
    config = fit_config(config or ServingEngine.Config(), model)
    runner = config.runner
    if not isinstance(runner, ModelRunner.Config):
        raise RequestError(f"a {type(runner).__qualname__} cannot be planned\n    expected: model-runner")
    if config.tensor_parallel not in (None, machine.devices):
        raise RequestError(
            "a plan is of one replica, whose devices share each product\n"
            f"    got: serving.tensor_parallel={config.tensor_parallel}, and {machine.devices} devices of {machine.name}\n"
            "    fix: leave one of them out, or name a target of as many devices"
        )
    started = time.perf_counter()
    steps = Steps(runner, model, machine, mesh or tensor_parallel(machine))
    context = max(1, runner.max_context // 2)
    plain = [b for b in steps.buckets if not b.chunks]
    alone = steps.plan(plain[0], 1, 0, context)
    full = steps.plan(plain[-1], runner.max_rows, 0, context) if len(plain) > 1 else alone
    largest = max(steps.buckets, key=lambda b: b.tokens)
    mixed = steps.plan(largest, min(runner.max_rows, largest.rows), largest.chunks * largest.chunk, context)
    if export is not None:
        with uncached():
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
        capacity=capacity(machine),
        context=context,
        alone=alone,
        full=full,
        mixed=mixed,
        layers=next(iter(counts), 0),
        layers_compiled=steps.layers_compiled,
        kernels=steps.choices(),
        notes=(*notes, *steps.program.notes()),
        compile_seconds=time.perf_counter() - started,
    )


def tensor_parallel(machine: Machine) -> Mesh:
    """All devices share each product."""
    return Mesh(shape={"tensor": machine.devices} if machine.devices > 1 else {})


def held_in_compute_dtype(model: Node[Any]) -> tuple[Node[Any], tuple[str, ...]]:
    """The config of a model whose weights are held as it computes, and a note where that changes it.

    Training holds float32 weights of a model that computes in bfloat16; what is served is exported in the latter.
    """
    if not isinstance(model, Layer.Config):
        return model, ()
    stored, computed = model.param_dtype, model.dtype
    if stored is None or computed is None or stored == computed:
        return model, ()
    note = f"the weights are taken to be in {computed}, as exports hold them; training holds them in {stored}"
    return patch(model, {"param_dtype": computed}), (note,)
