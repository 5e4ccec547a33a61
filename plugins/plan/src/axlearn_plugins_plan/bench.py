"""`axlearn bench step`: training steps measured on the devices that are here."""

import itertools
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.compose import Program, compose
from axlearn_core.contracts.capabilities import vocabulary_size
from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.resolve import Resolved
from axlearn_core.run.lock import peak_flops
from axlearn_core.train.session import batch_tokens
from axlearn_core.train.trainer import Trainer
from axlearn_plugins_plan.memory import of_compiled

BATCHES = 4
"""Different batches that the steps take in turn: routers and losses see more than one."""
TRACED = 5
"""Steps that are traced, of which the slowest trace is kept."""


@attrs.frozen(kw_only=True)
class Measured:
    """A training step as it ran. Bytes are of one device, or of the process where all devices share its memory.

    Attributes:
        devices: `8 x NVIDIA H100 80GB HBM3`.
        seconds: of each measured step, without its input.
        compile_seconds: of the step; short where JAX's cache had it.
        input_seconds: of a batch, the median: what the input takes, which a training run overlaps with steps.
        tokens: of a step; None for batches without tokens.
        model_flops: of a step, by the convention of model FLOPs utilisation.
        peak_flops: of all devices together; None where it is not known.
        planned_bytes: what the compiled step needs, times `sharing`.
        planned_at_most: whether that is an upper bound: on TPUs, where only `axlearn plan` reads how the compiler lays out buffers.
        used_bytes: the most that was taken while the steps ran; None where nothing tells.
        sharing: how many devices share the memory that was measured.
        trace: the directory of the trace, for TensorBoard or Perfetto; None without one.
        traced_seconds: of the slowest traced step.
    """

    title: str
    devices: str
    machine: Machine | None
    seconds: tuple[float, ...]
    compile_seconds: float
    input_seconds: float
    tokens: int | None
    model_flops: int
    peak_flops: float | None
    planned_bytes: int
    used_bytes: int | None
    sharing: int
    trace: Path | None
    traced_seconds: float | None
    planned_at_most: bool = False

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation."""
        return self.model_flops / self.median / self.peak_flops if self.peak_flops else None


def measure_step(
    resolved: Resolved, *, steps: int, warmup: int, trace: Path | None, progress: Callable[[str], None] = lambda _: None
) -> Measured:
    """Runs training steps of a request, which has to be resolved for the devices that are here.

    The state is initialised as a run's is; batches come from the experiment's input and lie on the devices before a step
    begins. Nothing is evaluated or saved.

    Args:
        resolved: the request, checked.
        steps: how many are measured.
        warmup: how many run before them.
        trace: an empty or new directory for the trace of the slowest of a few further steps; None traces nothing.

    Raises:
        RequestError: it is not a trainer, or its input gives no batch.
    """
    config: Any = resolved.config
    if not isinstance(config, Trainer.Config):
        raise RequestError(f"{resolved.title} is a {type(config).__qualname__}; expected a Trainer.Config")
    config.distributed.build().initialize()
    program = compose(config, machine=resolved.machine)
    batches, input_seconds = _batches(program, config)
    started = time.perf_counter()
    compiled = program.compile("train", batches[0])
    compile_seconds = time.perf_counter() - started
    progress(f"compiled in {compile_seconds:.1f} s; {warmup} steps to warm up, then {steps}")
    watermark = _Watermark(program.layout.mesh.local_devices)
    runner = _Runner(program, program.init(config.seed), batches)
    runner.run(warmup)
    seconds = runner.run(steps)
    used = watermark.read()
    planned = of_compiled(compiled, resolved.machine)
    traced = _trace_slowest(runner, trace) if trace is not None else None
    devices = program.layout.mesh.devices
    return Measured(
        title=resolved.title,
        devices=f"{devices.size} x {devices.flat[0].device_kind}",
        machine=resolved.machine,
        seconds=tuple(seconds),
        compile_seconds=compile_seconds,
        input_seconds=input_seconds,
        tokens=batch_tokens(batches[0]),
        model_flops=program.model_flops(batches[0]),
        peak_flops=peak_flops(program),
        planned_bytes=planned.total * watermark.sharing,
        planned_at_most=planned.at_most,
        used_bytes=used,
        sharing=watermark.sharing,
        trace=trace,
        traced_seconds=traced,
    )


def _batches(program: Program, config: Any) -> tuple[list[Any], float]:
    source = config.build_input(config.input, vocabulary_size(program.functional.describe()))
    stream = source.train()
    batches, seconds = [], []
    try:
        for _ in range(BATCHES):
            started = time.perf_counter()
            batch = next(stream)
            seconds.append(time.perf_counter() - started)
            batches.append(program.put(batch))
    except StopIteration:
        if not batches:
            raise RequestError(
                "the input gives no batch\n    fix: give it more data, or set a smaller input.batch_size"
            ) from None
    finally:
        stream.close()
    return batches, statistics.median(seconds)


class _Runner:
    """Takes steps, one after the other, and waits for each."""

    def __init__(self, program: Program, state: Any, batches: Sequence[Any]):
        self.program, self.state, self._batches = program, state, itertools.cycle(batches)
        jax.block_until_ready((state, batches))

    def run(self, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        seconds = []
        for batch in itertools.islice(self._batches, count):
            started = time.perf_counter()
            self.state, scalars = self.program.train_step(self.state, batch)
            jax.block_until_ready((self.state, scalars))
            seconds.append(time.perf_counter() - started)
        return seconds


def _trace_slowest(runner: _Runner, directory: Path) -> float:
    """Traces some steps, each alone, and leaves the trace of the slowest in the directory; its seconds."""
    slowest = -1.0
    for index in range(TRACED):
        own = directory / f"step-{index}"
        with jax.profiler.trace(str(own)):
            (seconds,) = runner.run(1)
        if seconds <= slowest:
            shutil.rmtree(own)
            continue
        for other in directory.glob("step-*"):
            if other != own:
                shutil.rmtree(other)
        slowest = seconds
    return slowest


class _Watermark:
    """The most memory that is taken from now on: by a device where it tells, else by this process beyond what it has now.

    Attributes:
        sharing: how many devices share what is measured.
    """

    def __init__(self, devices: Sequence[Any]):
        self.devices = devices
        self.by_device = all((d.memory_stats() or {}).get("peak_bytes_in_use") is not None for d in devices)
        self.sharing = 1 if self.by_device else len(devices)
        self.before = 0 if self.by_device else _resident(reset=True)

    def read(self) -> int | None:
        """Bytes; None where neither device nor system tells."""
        if self.by_device:
            return max(d.memory_stats()["peak_bytes_in_use"] for d in self.devices)
        return None if self.before is None else max(0, (_resident() or 0) - self.before)


def _resident(reset: bool = False) -> int | None:
    """The process's greatest resident set since the last reset; with `reset`, what it is now."""
    status = Path("/proc/self/status")
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    except OSError:
        if reset or sys.platform == "win32":
            return None
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def as_json(measured: Measured) -> dict[str, Any]:
    """One object; seconds and bytes."""
    seconds = sorted(measured.seconds)
    return {
        "experiment": measured.title,
        "devices": measured.devices,
        "target": None if measured.machine is None else measured.machine.name,
        "steps": len(seconds),
        "seconds": {"median": measured.median, "least": seconds[0], "most": seconds[-1]},
        "tokens_per_second": None if measured.tokens is None else measured.tokens / measured.median,
        "model_flops": measured.model_flops,
        "flops_per_second": measured.model_flops / measured.median,
        "mfu": measured.mfu,
        "compile_seconds": measured.compile_seconds,
        "input_seconds": measured.input_seconds,
        "planned_bytes": measured.planned_bytes,
        "planned_at_most": measured.planned_at_most,
        "used_bytes": measured.used_bytes,
        "devices_sharing": measured.sharing,
        "trace": None if measured.trace is None else str(measured.trace),
        "traced_seconds": measured.traced_seconds,
    }


def text(measured: Measured) -> str:
    """For people."""
    facts = as_json(measured)
    seconds, gib = facts["seconds"], 2**30
    rows = [
        ("devices", measured.devices),
        (
            "step",
            f"{seconds['median']:.4g} s (least {seconds['least']:.4g}, most {seconds['most']:.4g}, {facts['steps']} steps)",
        ),
    ]
    if facts["tokens_per_second"] is not None:
        rows.append(("tokens/s", f"{facts['tokens_per_second']:,.0f}"))
    rows.append(("model FLOP/s", f"{facts['flops_per_second']:.3g}"))
    rows.append(
        ("MFU", "unknown: no installed plugin knows the peak" if measured.mfu is None else f"{measured.mfu:.1%}")
    )
    whose = "a device" if measured.sharing == 1 else f"{measured.sharing} devices that share memory"
    used = "unknown" if measured.used_bytes is None else f"{measured.used_bytes / gib:.3g} GiB"
    bound = "at most " if measured.planned_at_most else ""
    rows.append(("memory", f"{used} used, {bound}{measured.planned_bytes / gib:.3g} GiB planned, of {whose}"))
    rows.append(("input", f"{measured.input_seconds:.3g} s a batch, while devices compute"))
    rows.append(("compile", f"{measured.compile_seconds:.3g} s"))
    if measured.trace is not None:
        rows.append(
            ("trace", f"{measured.trace} (the slowest of {TRACED} traced steps, {measured.traced_seconds:.4g} s)")
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join([measured.title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)])
