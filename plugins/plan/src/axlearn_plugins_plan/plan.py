"""A plan: a function of an experiment, compiled for a machine, and what is read from it."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program, compose
from axlearn_core.compose.devices import configure_devices, topology_devices
from axlearn_core.compose.objective import replicated
from axlearn_core.config import Node, find, flatten, get, missing
from axlearn_core.config.roles import StackRole
from axlearn_core.contracts.capabilities import DeclaresBatches, DeclaresFunctions, vocabulary_size
from axlearn_core.contracts.experiment import accumulate_steps, input_of
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.kernels.selection import Choice
from axlearn_core.plugins.resolve import Resolved
from axlearn_core.plugins.targets import targets
from axlearn_plugins_plan.batches import abstract_batch
from axlearn_plugins_plan.collectives import Collective, by_axes, collectives
from axlearn_plugins_plan.compilation import compile_function
from axlearn_plugins_plan.flops import ModelFlops, executed_flops, model_flops
from axlearn_plugins_plan.groups import Places, domains_of
from axlearn_plugins_plan.hlo import parse
from axlearn_plugins_plan.memory import Memory, shard_bytes
from axlearn_plugins_plan.predict import Prediction, predict
from axlearn_plugins_plan.roofline import Roofline, roofline, utilisation
from axlearn_plugins_plan.tags import Tag, tags
from axlearn_plugins_plan.traffic import hbm_bytes


@attrs.frozen(kw_only=True)
class Plan:
    """What is known of one call of a function on one machine. Bytes and collectives are those of one device.

    Attributes:
        function: its name: `train` for a training step.
        memory: what it takes, and whether that fits.
        flops: of the mathematics, of all devices.
        executed: dtype -> FLOPs that the program does, of all devices.
        hbm_traffic: bytes to and from memory; None where the compiler stopped.
        collectives: None where the compiler stopped.
        rows: of the batch.
        tokens: of the batch; None where the function takes none.
        tags: activation tags of a training step; empty where the model has none.
        gradient_bytes: 0 where the function does not differentiate.
        compiler_options: XLA's, of the target, the kernels and the config.
        compile_seconds: tracing, lowering and compiling.
    """

    title: str
    function: str
    machine: Machine
    rule: str | None
    notes: tuple[str, ...]
    mesh: Mapping[str, int]
    rows: int
    tokens: int | None
    parameters: int
    remat: tuple[str, ...]
    memory: Memory
    flops: ModelFlops
    executed: Mapping[str, float]
    hbm_traffic: float | None
    collectives: Sequence[Collective] | None
    roofline: Roofline
    kernels: tuple[Choice, ...]
    tags: tuple[Tag, ...]
    gradient_bytes: int
    accumulate_steps: int
    compiler_options: Mapping[str, Any]
    compile_seconds: float

    def mfu(self, causal: bool = False) -> float | None:
        """At the roofline; None where the hardware's peak is not known."""
        flops = self.flops.causal if causal else self.flops.full
        return utilisation(flops, self.roofline.step, self.machine.target, self.machine.devices)

    @property
    def mfu_note(self) -> str | None:
        """Why a utilisation at the roofline exceeds 1; None if neither does."""
        full, causal = self.mfu(), self.mfu(causal=True)
        if causal is not None and causal > 1:
            faster = ", ".join(sorted(d for d, flops in self.executed.items() if flops and d != "bfloat16"))
            return f"more than 100%: the share is of the peak in bfloat16, and some products are in {faster or 'other dtypes'}"
        if full is not None and full > 1:
            return "more than 100%: full attention counts pairs that the mask hides, and the kernel skips those"
        return None

    @property
    def prediction(self) -> Prediction | None:
        """The time of a training step beside its roofline; None where no such step on the target is known."""
        if self.function != "train" or self.collectives is None:
            return None
        grouped = any(choice.op.name == "grouped_matmul" for choice in self.kernels)
        return predict(self.machine, self.roofline, grouped=grouped)

    @property
    def collective_bytes(self) -> Mapping[str, float] | None:
        """Mesh axes -> bytes that one device sends over them."""
        return None if self.collectives is None else by_axes(self.collectives)


def machine_of(resolved: Resolved) -> Machine:
    """The machine that a request names; raises `RequestError` where it names none."""
    if resolved.machine is None:
        examples = sorted({e for _, t in targets().values() for e in t.examples})
        raise RequestError(
            "a plan is for some hardware, and none is named\n"
            f"    fix: add --target NAME, such as {', '.join(examples[:6])}; `axlearn targets list` lists them"
        )
    return resolved.machine


def prepared(resolved: Resolved) -> tuple[Program, dict[str, jax.ShapeDtypeStruct]]:
    """The program of a request for its machine, and the shapes of its batches.

    What only the data needs (files, a tokenizer) may be unset where the input can tell the shapes without it.

    Raises:
        ConfigError: something else is missing, or does not fit.
        RequestError: no machine is named, or nothing can compile for it.
    """
    machine, config = machine_of(resolved), resolved.config
    if input_of(config) is None or not isinstance(config, DeclaresFunctions):
        raise RequestError(f"{resolved.title} is a {type(config).__qualname__}; expected a Trainer.Config")
    _check(resolved)
    configure_devices(machine)
    program = compose(config, topology_devices(machine), machine=machine)  # type: ignore[arg-type]
    return program, abstract_batch(config, vocabulary_size(program.functional.describe()))


def _check(resolved: Resolved) -> None:
    """What is wrong with the config, but for what the parts of an input need that tells the shapes of its batches."""
    try:
        resolved.checked()
    except ConfigError as error:
        source = get(resolved.config, "input")
        unset = {p.path for p in missing(resolved.config)}
        parts = [
            p for p in error.problems if p.path.startswith("input.") and (p.path.count(".") > 1 or p.path in unset)
        ]
        if not isinstance(source, DeclaresBatches) or not source.batch_shapes():
            raise
        if own_problems := [p for p in error.problems if p not in parts]:
            raise ConfigError(own_problems) from None
        if not all(isinstance(size, int) for shape, _ in source.batch_shapes().values() for size in shape):
            raise


def make_plan(resolved: Resolved, function: str = "train") -> Plan:
    """Compiles a function of a request for its machine, and reads what the compiler made.

    Args:
        resolved: the request.
        function: a name that the experiment declares. Its shapes are those of the experiment's batches
            (`Function.bucket_of`).

    Raises:
        RequestError: the request is wrong (see `prepared`), or the experiment has no such function.
        WorkError: the compiler stopped for another reason than memory.
    """
    program, batch = prepared(resolved)
    machine = machine_of(resolved)
    bucket = program.function(function).bucket_of(batch)
    trains = program.function(function).differentiates
    started = time.perf_counter()
    program.lower(function, bucket)  # which JAX keeps
    with ThreadPoolExecutor(1) as pool:  # the compiler leaves Python free to count meanwhile
        compiling = pool.submit(_timed, started, compile_function, program, function, bucket, machine)
        flops, executed = model_flops(program, function, bucket), executed_flops(program, function, bucket)
        activations = tags(program, batch) if trains else []
        (compiled, memory), seconds = compiling.result()
    moved = traffic = None
    unchanged = [str(decision) for decision in resolved.decisions if decision.kind == "unchanged"]
    notes = [*resolved.notes, *unchanged, *map(str, replicated(program.trained))]
    if machine.target.stand_in:
        notes.append(f"not the program that runs there: {machine.target.stand_in}")
    if compiled is not None:
        module = parse(compiled.as_text())
        moved, traffic, more = _read(module, program, machine)
        notes += more
        if machine.target.stand_in:  # whose fusions say nothing of the other compiler's
            moved = (2.0 if trains else 1.0) * memory.arguments
            how = "the state is counted, read and written once" if trains else "the arguments are counted, read once"
            notes.append(f"to and from memory only {how}")
    else:
        notes.append("the compiler stopped for lack of memory: no module tells what is sent and moved")
    is_batch = isinstance(bucket, Mapping)
    return Plan(
        title=resolved.title,
        function=function,
        machine=machine,
        rule=resolved.rule,
        notes=tuple(notes),
        mesh={a: n for a, n in program.layout.mesh.shape.items() if n > 1},
        rows=max((s.shape[0] for s in batch.values() if s.shape), default=0),
        tokens=int(batch["tokens"].size) if is_batch and "tokens" in batch else None,
        parameters=program.functional.num_parameters,
        remat=_remat(resolved.config) if trains else (),
        memory=memory,
        flops=flops,
        executed=executed,
        hbm_traffic=moved,
        collectives=traffic,
        roofline=roofline(machine.target, machine.devices, executed, moved, traffic),
        kernels=tuple(program.choices(function)),
        tags=tuple(activations),
        gradient_bytes=shard_bytes(program.state.params) if trains else 0,
        accumulate_steps=accumulate_steps(resolved.config),
        compiler_options=program.options(function),
        compile_seconds=seconds,
    )


def _timed(started: float, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """(what a function returns, seconds since `started`)."""
    return function(*args), time.perf_counter() - started


def _read(module: Any, program: Program, machine: Machine) -> tuple[float, list[Collective] | None, list[str]]:
    """(bytes to and from memory, collectives, notes)."""
    mesh = program.layout.mesh
    devices = list(mesh.devices.flat)
    places = Places(dict(mesh.shape), domains_of(devices, machine.devices_per_domain))
    notes = [f"the loop {name} is counted once: its length is not known" for name in module.unknown_loops()]
    try:
        traffic = collectives(module, places)
    except ValueError as error:  # a compiler that writes them in a way of its own; all else is still known
        return hbm_bytes(module), None, [*notes, f"what is sent is not known: {error}"]
    return hbm_bytes(module), traffic, notes


def _remat(config: Node[Any]) -> tuple[str, ...]:
    """What the config says of rematerialisation, a line for each stack that does."""
    lines = []
    for path, stack in find(config, StackRole).items():
        if stack.remat is None:
            lines.append(f"{path}.remat: null")
        else:
            lines += [f"{path}.remat.{k}: {v}" for k, v in flatten(stack.remat).items() if k != "type"]
    return tuple(lines)
