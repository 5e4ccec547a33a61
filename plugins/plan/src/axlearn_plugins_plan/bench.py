"""Measure training steps on the local devices, for `axlearn bench step`."""

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
from axlearn_plugins_plan.memory import compiled_memory

BATCHES = 4
"""Number of distinct batches that the steps cycle through. It exceeds one so that routers and losses see varied data."""
TRACED = 5
"""Number of traced steps. Only the trace of the slowest step is kept."""


@attrs.frozen(kw_only=True)
class StepMeasurement:
    """Measurements of a training step. Bytes are per device, or for the whole process if all devices share its memory.

    Attributes:
        devices: Number and kind of the devices, such as `8 x NVIDIA H100 80GB HBM3`.
        seconds: Time of each measured step, excluding the time to read its input.
        compile_seconds: Time to compile the step. It is short if the program was in JAX's cache.
        input_seconds: Median time to read a batch. A training run reads batches while steps run.
        tokens: Tokens per step. None for batches without tokens.
        model_flops: Model FLOPs per step, as used for model FLOPs utilization (MFU).
        peak_flops: Total peak FLOP/s of all devices. None if unknown.
        planned_bytes: Memory that the compiled step needs, times `sharing`.
        planned_is_upper_bound: Whether `planned_bytes` is an upper bound. True on TPUs, because only `axlearn plan` reads the
            compiler's buffer assignment.
        used_bytes: Peak memory during the steps. None if neither the devices nor the system report it.
        sharing: Number of devices that share the measured memory.
        trace: Directory of the trace, for TensorBoard or Perfetto. None if no step was traced.
        traced_seconds: Time of the slowest traced step.
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
    planned_is_upper_bound: bool = False

    @property
    def median(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, or None if the peak is unknown."""
        return self.model_flops / self.median / self.peak_flops if self.peak_flops else None


def measure_step(
    resolved: Resolved, *, steps: int, warmup: int, trace: Path | None, progress: Callable[[str], None] = lambda _: None
) -> StepMeasurement:
    """Measure training steps of a request on the local devices.

    The state is initialized as in a training run. Batches come from the experiment's input and are already on the devices when a
    step starts. Nothing is evaluated or saved.

    Args:
        resolved: The request, checked and resolved for the local devices.
        steps: Number of measured steps.
        warmup: Number of steps to run before the measurement.
        trace: New or empty directory for a trace. A few additional steps run, and the slowest one's trace is kept. If None, no
            step is traced.
        progress: Called with a line of text for each stage.

    Raises:
        RequestError: The experiment is not a trainer, or its input is empty.
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
    progress(f"compiled in {compile_seconds:.1f} s; running {warmup} warm-up steps and {steps} measured steps")
    watermark = _Watermark(program.layout.mesh.local_devices)
    runner = _Runner(program, program.init(config.seed), batches)
    runner.run(warmup)
    seconds = runner.run(steps)
    used = watermark.read()
    planned = compiled_memory(compiled, resolved.machine)
    traced = _trace_slowest(runner, trace) if trace is not None else None
    devices = program.layout.mesh.devices
    return StepMeasurement(
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
        planned_is_upper_bound=planned.is_upper_bound,
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
                "the input has less than one batch of data\n    fix: add data, or set a smaller input.batch_size"
            ) from None
    finally:
        stream.close()
    return batches, statistics.median(seconds)


class _Runner:
    """Runs training steps one at a time, and waits for each step."""

    def __init__(self, program: Program, state: Any, batches: Sequence[Any]):
        self.program, self.state, self._batches = program, state, itertools.cycle(batches)
        jax.block_until_ready((state, batches))

    def run(self, count: int) -> list[float]:
        """Run `count` steps. Return the seconds of each step."""
        seconds = []
        for batch in itertools.islice(self._batches, count):
            started = time.perf_counter()
            self.state, scalars = self.program.train_step(self.state, batch)
            jax.block_until_ready((self.state, scalars))
            seconds.append(time.perf_counter() - started)
        return seconds


def _trace_slowest(runner: _Runner, directory: Path) -> float:
    """Trace a few steps separately, and keep only the trace of the slowest step. Return its seconds."""
    slowest = -1.0
    for index in range(TRACED):
        trace = directory / f"step-{index}"
        with jax.profiler.trace(str(trace)):
            (seconds,) = runner.run(1)
        if seconds <= slowest:
            shutil.rmtree(trace)
            continue
        for other in directory.glob("step-*"):
            if other != trace:
                shutil.rmtree(other)
        slowest = seconds
    return slowest


class _Watermark:
    """Peak memory since construction.

    Measures the peak of one device if the devices report it. Otherwise, measures how much the memory of this process grew.

    Attributes:
        sharing: Number of devices that share the measured memory.
    """

    def __init__(self, devices: Sequence[Any]):
        self.devices = devices
        self.has_device_peak = all((d.memory_stats() or {}).get("peak_bytes_in_use") is not None for d in devices)
        self.sharing = 1 if self.has_device_peak else len(devices)
        self.before = 0 if self.has_device_peak else _resident(reset=True)

    def read(self) -> int | None:
        """Return the peak in bytes, or None if neither the devices nor the system report it."""
        if self.has_device_peak:
            return max(d.memory_stats()["peak_bytes_in_use"] for d in self.devices)
        return None if self.before is None else max(0, (_resident() or 0) - self.before)


def _resident(reset: bool = False) -> int | None:
    """Return the peak resident set size of the process since the last reset, in bytes. With `reset`, reset the peak first."""
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


def as_json(measured: StepMeasurement) -> dict[str, Any]:
    """Return the measurements as one JSON object, in seconds and bytes."""
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
        "planned_at_most": measured.planned_is_upper_bound,
        "used_bytes": measured.used_bytes,
        "devices_sharing": measured.sharing,
        "trace": None if measured.trace is None else str(measured.trace),
        "traced_seconds": measured.traced_seconds,
    }


def text(measured: StepMeasurement) -> str:
    """Format the measurements as text."""
    facts = as_json(measured)
    seconds, gib = facts["seconds"], 2**30
    rows = [
        ("devices", measured.devices),
        (
            "step",
            f"{seconds['median']:.4g} s (min {seconds['least']:.4g}, max {seconds['most']:.4g}, {facts['steps']} steps)",
        ),
    ]
    if facts["tokens_per_second"] is not None:
        rows.append(("tokens/s", f"{facts['tokens_per_second']:,.0f}"))
    rows.append(("model FLOP/s", f"{facts['flops_per_second']:.3g}"))
    rows.append(
        ("MFU", "unknown: no installed plugin lists the peak" if measured.mfu is None else f"{measured.mfu:.1%}")
    )
    owner = "per device" if measured.sharing == 1 else f"for {measured.sharing} devices that share memory"
    used = "unknown" if measured.used_bytes is None else f"{measured.used_bytes / gib:.3g} GiB"
    bound = "at most " if measured.planned_is_upper_bound else ""
    rows.append(("memory", f"{used} used, {bound}{measured.planned_bytes / gib:.3g} GiB planned, {owner}"))
    rows.append(("input", f"{measured.input_seconds:.3g} s per batch, overlapped with compute"))
    rows.append(("compile", f"{measured.compile_seconds:.3g} s"))
    if measured.trace is not None:
        rows.append(("trace", f"{measured.trace} (slowest of {TRACED} traced steps, {measured.traced_seconds:.4g} s)"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([measured.title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)])
