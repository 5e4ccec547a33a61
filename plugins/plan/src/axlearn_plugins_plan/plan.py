"""Compile a function of an experiment for a machine, and collect figures such as memory and time in a plan."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import configure_devices, topology_devices
from axlearn_core.compose.objective import decide_replication
from axlearn_core.config import Node, find, find_missing, flatten, get, patch
from axlearn_core.config.roles import StackRole
from axlearn_core.contracts.capabilities import DeclaresBatches, DeclaresFunctions, vocabulary_size
from axlearn_core.contracts.experiment import (
    accumulate_steps,
    batch_size,
    get_input_config,
    get_model_config,
    num_shards,
)
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import AxlearnError, ConfigError, RequestError
from axlearn_core.kernels.selection import Choice
from axlearn_core.plugins.resolve import Resolved
from axlearn_core.plugins.targets import targets
from axlearn_plugins_plan.batches import abstract_batch
from axlearn_plugins_plan.collectives import Collective, collectives, sum_by_axes
from axlearn_plugins_plan.compilation import compile_function
from axlearn_plugins_plan.flops import ModelFlops, executed_flops, model_flops
from axlearn_plugins_plan.groups import Places, find_domains
from axlearn_plugins_plan.hlo import parse
from axlearn_plugins_plan.largest_batch import MAX_COMPILES, LargestBatch, find_largest_batch
from axlearn_plugins_plan.memory import Memory, shard_bytes
from axlearn_plugins_plan.predict import Prediction, predict, unknown_ops
from axlearn_plugins_plan.roofline import Roofline, roofline, utilisation
from axlearn_plugins_plan.tags import Tag, tags
from axlearn_plugins_plan.traffic import hbm_bytes


@attrs.frozen(kw_only=True, repr=False)
class FunctionPlan:
    """The figures for a function call on a machine. Bytes and collectives are per device.

    Attributes:
        function: Name of the function; `train` for a training step.
        memory: Memory per device, and whether it fits.
        flops: Model FLOPs on all devices.
        executed_flops: dtype -> FLOPs that the program executes on all devices.
        hbm_traffic: Bytes read from and written to device memory. None if the compiler stopped.
        collectives: Collectives of the program. None if the compiler stopped.
        rows: Number of rows in the batch.
        tokens: Number of tokens in the batch. None if the function does not take tokens.
        batch_shards: Number of devices or groups of devices that a batch is sharded over.
        batch_unit: The mesh, the microbatches and the input require the number of rows in a batch to be a multiple of this
            number.
        batch: Source of the batch size. None if the function does not take one of the experiment's batches.
        trained: Number of parameters that a training step updates.
        frozen_bytes: Bytes per device of the float32 parameters that a training step does not update.
        compute_dtype: Dtype in which the model computes. None if the model does not specify one.
        features: Names of the applied features.
        largest_batch: The largest batch that fits. None if no search was run.
        tags: Activation tags of a training step. Empty if the model has no tags.
        gradient_bytes: Bytes of the trained parameters' gradients. 0 if the function does not differentiate.
        compiler_options: XLA options from the target, the kernels and the config.
        compile_seconds: Time to trace, lower and compile.
    """

    title: str
    function: str
    machine: Machine
    rule: str | None
    notes: tuple[str, ...]
    mesh: Mapping[str, int]
    rows: int
    tokens: int | None
    batch_shards: int
    batch_unit: int
    batch: str | None
    parameters: int
    trained: int
    frozen_bytes: int
    compute_dtype: str | None
    features: frozenset[str]
    remat: tuple[str, ...]
    memory: Memory
    flops: ModelFlops
    executed_flops: Mapping[str, float]
    hbm_traffic: float | None
    collectives: Sequence[Collective] | None
    roofline: Roofline
    kernels: tuple[Choice, ...]
    tags: tuple[Tag, ...]
    gradient_bytes: int
    accumulate_steps: int
    compiler_options: Mapping[str, Any]
    compile_seconds: float
    largest_batch: LargestBatch | None = None

    def __str__(self) -> str:
        from axlearn_plugins_plan.render import text

        return text(self)

    def mfu(self, causal: bool = False) -> float | None:
        """Return the model FLOPs utilization at the roofline, or None if the hardware's peak is unknown."""
        flops = self.flops.causal if causal else self.flops.full
        return utilisation(flops, self.roofline.step, self.machine.target, self.machine.devices)

    def __repr__(self) -> str:
        from axlearn_plugins_plan.render import size, title

        fits = "fits" if self.memory.fits else "does not fit"
        return f"<{title(self)}; {fits}: {size(self.memory.total)} of {size(self.memory.capacity)}>"

    def _repr_html_(self) -> str:
        from axlearn_plugins_plan.plan_html import as_html

        return as_html(self)

    @property
    def mfu_note(self) -> str | None:
        """Explanation of a utilization above 1 at the roofline, or None if the utilization is at most 1."""
        full, causal = self.mfu(), self.mfu(causal=True)
        if causal is not None and causal > 1:
            faster = ", ".join(sorted(d for d, flops in self.executed_flops.items() if flops and d != "bfloat16"))
            return f"more than 100%: the peak is for bfloat16, but some products are in {faster or 'other dtypes'}"
        if full is not None and full > 1:
            return "more than 100%: full attention counts masked pairs, which the kernel skips"
        return None

    @property
    def prediction(self) -> Prediction | None:
        """Predicted time of a training step, or None if there are no measured steps for the target."""
        if self.function != "train" or self.collectives is None:
            return None
        grouped = any(choice.op.name == "grouped_matmul" for choice in self.kernels)
        return predict(self.machine, self.roofline, grouped=grouped, unknown=unknown_ops(self.kernels))

    @property
    def collective_bytes(self) -> Mapping[str, float] | None:
        """Mesh axes -> bytes that one device sends over those axes."""
        return None if self.collectives is None else sum_by_axes(self.collectives)


def require_machine(resolved: Resolved) -> Machine:
    """Return the machine of a request. Raise `RequestError` if the request has no target."""
    if resolved.machine is None:
        examples = sorted({e for _, t in targets().values() for e in t.examples})
        raise RequestError(
            "a plan needs a target machine\n"
            f"    fix: add --target NAME, such as {', '.join(examples[:6])}; `axlearn targets list` lists all of them"
        )
    return resolved.machine


def compose_program(resolved: Resolved) -> tuple[Program, dict[str, jax.ShapeDtypeStruct]]:
    """Compose the program of a request for its machine.

    Fields that only affect the data (files, a tokenizer) may be unset if the input can report its batch shapes without them.

    Returns:
        The program, and a mapping from the name of each array in a batch to its shape and dtype.

    Raises:
        ConfigError: Any other field is missing or invalid.
        RequestError: The request has no target, or no installed compiler supports the target.
    """
    machine, config = require_machine(resolved), resolved.config
    if get_input_config(config) is None or not isinstance(config, DeclaresFunctions):
        raise RequestError(f"{resolved.title} is a {type(config).__qualname__}; expected a Trainer.Config")
    _check_config(resolved)
    configure_devices(machine)
    program = compose(config, topology_devices(machine), machine=machine)  # type: ignore[arg-type]
    return program, abstract_batch(config, vocabulary_size(program.functional.describe()))


def _check_config(resolved: Resolved) -> None:
    """Raise `ConfigError` if the config is invalid, but accept unset input fields if the batch shapes are still known."""
    try:
        resolved.check()
    except ConfigError as error:
        source = get(resolved.config, "input")
        unset = {p.path for p in find_missing(resolved.config)}
        input_problems = [
            p for p in error.problems if p.path.startswith("input.") and (p.path.count(".") > 1 or p.path in unset)
        ]
        if not isinstance(source, DeclaresBatches) or not source.batch_shapes():
            raise
        if other_problems := [p for p in error.problems if p not in input_problems]:
            raise ConfigError(other_problems) from None
        if not all(isinstance(size, int) for shape, _ in source.batch_shapes().values() for size in shape):
            raise


def make_plan(resolved: Resolved, function: str = "train") -> FunctionPlan:
    """Compile one of the experiment's functions for the request's machine, and build a plan from the compiled program.

    Args:
        resolved: The resolved request.
        function: Name of a function that the experiment declares. `Function.get_bucket` maps a batch to its shapes.

    Raises:
        RequestError: The request is invalid (see `compose_program`), or the experiment has no such function.
        WorkError: The compiler stopped for a reason other than lack of memory.
    """
    program, batch = compose_program(resolved)
    machine = require_machine(resolved)
    bucket = program.function(function).get_bucket(batch)
    trains = program.function(function).differentiates
    started = time.perf_counter()
    program.lower(function, bucket)  # JAX caches the result for the compilation below
    with ThreadPoolExecutor(1) as pool:  # the compiler releases the GIL, so count FLOPs in parallel
        compiling = pool.submit(_run_timed, started, compile_function, program, function, bucket, machine)
        flops, executed = model_flops(program, function, bucket), executed_flops(program, function, bucket)
        activations = tags(program, batch) if trains else []
        (compiled, memory), seconds = compiling.result()
    moved = traffic = None
    decisions = [*(d for d in resolved.decisions if d.kind == "unchanged"), *decide_replication(program.trained)]
    notes = [*resolved.notes, *map(str, decisions)]
    if machine.target.stand_in:
        notes.append(f"this is not the program that runs on the target: {machine.target.stand_in}")
    if compiled is not None:
        module = parse(compiled.as_text())
        moved, traffic, more = _read_module(module, program, machine)
        notes += more
        if machine.target.stand_in:  # the real compiler fuses differently
            moved = (2.0 if trains else 1.0) * memory.arguments
            how = "one read and one write of the state" if trains else "one read of the arguments"
            notes.append(f"memory traffic counts only {how}")
    else:
        notes.append("the compiler ran out of memory, so traffic and collectives are unknown")
    return FunctionPlan(
        title=resolved.title,
        function=function,
        machine=machine,
        rule=resolved.rule,
        notes=tuple(notes),
        mesh={a: n for a, n in program.layout.mesh.shape.items() if n > 1},
        **_describe_batch(resolved, program, batch, bucket),
        **_describe_parameters(resolved.config, program, function),
        features=frozenset(name for name, _ in resolved.features),
        remat=_remat(resolved.config) if trains else (),
        memory=memory,
        flops=flops,
        executed_flops=executed,
        hbm_traffic=moved,
        collectives=traffic,
        roofline=roofline(machine.target, machine.devices, executed, moved, traffic),
        kernels=tuple(program.choices(function)),
        tags=tuple(activations),
        accumulate_steps=accumulate_steps(resolved.config),
        compiler_options=program.options(function),
        compile_seconds=seconds,
    )


def _describe_batch(resolved: Resolved, program: Program, batch: Mapping[str, Any], bucket: Any) -> dict[str, Any]:
    """Return the plan fields that describe the experiment's batch."""
    is_batch = isinstance(bucket, Mapping)
    layout, config = program.layout, resolved.config
    shards = math.prod(layout.mesh.shape[axis] for axis in layout.rules.get("batch", ()))
    source = resolved.setter("input.batch_size") or "the value of the experiment"
    size = "the batches of the input" if batch_size(config) is None else f"input.batch_size, {source}"
    return {
        "rows": max((s.shape[0] for s in batch.values() if s.shape), default=0),
        "tokens": int(batch["tokens"].size) if is_batch and "tokens" in batch else None,
        "batch": size if is_batch else None,
        "batch_shards": shards,
        "batch_unit": math.lcm(shards * accumulate_steps(config), num_shards(config) or 1),
    }


def _describe_parameters(config: Node[Any], program: Program, function: str) -> dict[str, Any]:
    """Return the plan fields that describe the trained and frozen parameters."""
    model = get_model_config(config)
    declared = program.function(function)
    frozen, specs = set(declared.frozen), program.trained_spec.params
    wide = [s for p, s in specs.items() if p in frozen and s.dtype == "float32"]
    trained = [s for p, s in specs.items() if p not in frozen]
    return {
        "parameters": program.functional.num_parameters,
        "trained": sum(s.size for p, s in program.functional.abstract.items() if p not in frozen),
        "frozen_bytes": shard_bytes(wide),
        "gradient_bytes": shard_bytes(trained) if declared.differentiates else 0,
        "compute_dtype": flatten(model).get("dtype") if isinstance(model, Node) else None,
    }


def add_largest_batch(plan: FunctionPlan, resolved: Resolved, progress: Callable[[str], None]) -> FunctionPlan:
    """Search for the largest batch of a training step that fits, and add it to the plan.

    Args:
        plan: Plan of the request's training step.
        resolved: The resolved request.
        progress: Called with a message before each compilation.

    Returns:
        The new plan, or `plan` if the capacity is unknown or the config does not set the batch size. If a batch cannot
        be compiled, a note in the new plan gives the reason.
    """
    if plan.memory.capacity is None or plan.function != "train" or batch_size(resolved.config) is None:
        return plan
    compiles = 0

    def measure(rows: int) -> Memory:
        nonlocal compiles
        compiles += 1
        progress(
            f"searching for the largest batch that fits: compiling {rows:,} rows ({compiles} of at most {MAX_COMPILES})"
        )
        config = patch(resolved.config, {"input.batch_size": rows})
        program, batch = compose_program(attrs.evolve(resolved, config=config))
        bucket = program.function(plan.function).get_bucket(batch)
        return compile_function(program, plan.function, bucket, require_machine(resolved))[1]

    try:
        largest = find_largest_batch(plan.rows, plan.batch_unit, plan.memory, measure)
    except AxlearnError as error:  # a part of the model, such as a pipeline, rejects this number of rows
        reason = str(error).partition("\n")[0]
        return attrs.evolve(plan, notes=(*plan.notes, f"the largest batch is unknown: {reason}"))
    return attrs.evolve(plan, largest_batch=largest)


def _run_timed(started: float, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Call a function. Return its result and the seconds since `started`."""
    return function(*args), time.perf_counter() - started


def _read_module(module: Any, program: Program, machine: Machine) -> tuple[float, list[Collective] | None, list[str]]:
    """Return (bytes moved to and from memory, collectives, notes)."""
    mesh = program.layout.mesh
    devices = list(mesh.devices.flat)
    places = Places(dict(mesh.shape), find_domains(devices, machine.devices_per_domain))
    notes = [f"the loop {name} counts once because its length is unknown" for name in module.unknown_loops()]
    try:
        traffic = collectives(module, places)
    except ValueError as error:  # an unknown form of replica groups; every other figure is still valid
        return hbm_bytes(module), None, [*notes, f"the collectives are unknown: {error}"]
    return hbm_bytes(module), traffic, notes


def _remat(config: Node[Any]) -> tuple[str, ...]:
    """Return the rematerialization settings of the config, with the path of each stack."""
    lines = []
    for path, stack in find(config, StackRole).items():
        if stack.remat is None:
            lines.append(f"{path}.remat: null")
        else:
            lines += [f"{path}.remat.{k}: {v}" for k, v in flatten(stack.remat).items() if k != "type"]
    return tuple(lines)
