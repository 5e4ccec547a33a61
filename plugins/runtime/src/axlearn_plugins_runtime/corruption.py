"""The `sdc-check` component: detect silent data corruption by repeating a step and comparing replicas."""

import socket
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axlearn_core.checkpoint.barrier import reduce_objects
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import WorkError, counted
from axlearn_core.learn.paths import flatten

_MULTIPLIER = 2654435761
Row = tuple[str, str, str, int]
"""(path, index ranges of the shard, device, checksum)."""


class CorruptionCheck(Configurable):
    """Computes every N-th step twice, compares the results bit by bit, and compares the replicas on all devices.

    A device with intermittent errors computes two different results. The results of a device with permanent errors differ from
    those of its replicas. Checksums are computed on the devices. Computing a step twice needs memory for a second training
    state.
    """

    @node
    class Config(Configurable.Config["CorruptionCheck"]):
        """Interval and kinds of checks.

        Attributes:
            every_steps: Steps between checks.
            rerun: Compute the checked step twice. The program must be deterministic, as XLA programs are by default.
            replicas: Compare shards that are replicated on several devices.
            wait_seconds: Seconds that processes wait for each other's checksums.
        """

        every_steps: int = setting(default=100, ge=1)
        rerun: bool = True
        replicas: bool = True
        wait_seconds: float = setting(default=600.0, gt=0)

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def due(self, step: int) -> bool:
        """See `axlearn_core.train.loop.StepCheck`."""
        return (step + 1) % self.cfg.every_steps == 0

    def take_step(self, session: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """See `axlearn_core.train.loop.StepCheck`.

        Raises:
            WorkError: Results or replicas differ. The error names the process, host, device and array. The step is not saved.
        """
        step = session.step + 1
        state_copy = jax.tree.map(jnp.copy, session.state) if self.cfg.rerun else session.state
        problems: list[str] = []
        first: list[Row] = []
        if self.cfg.rerun:
            result, _ = session.program.train_step(session.state, batch)
            first = checksums(result)
            del result
        state, scalars = session.program.train_step(state_copy, batch)
        rows = checksums(state)
        if self.cfg.rerun:
            problems += _compare_reruns(first, rows)
        replicas = [list(row) for row in rows] if self.cfg.replicas else []
        facts = [socket.gethostname(), problems, replicas]
        report_lines = reduce_objects(facts, _report_differences, "sdc-check", self.cfg.wait_seconds)
        if report_lines:
            raise WorkError(
                f"step {step} was computed incorrectly: silent data corruption\n"
                + "\n".join(f"    {line}" for line in report_lines)
                + "\n    fix: remove the machine named here and run the same command again to resume from the newest "
                "checkpoint, or add `--restore-step` to resume from an earlier one"
            )
        return state, scalars


def checksums(state: Any) -> list[Row]:
    """Return a checksum of each shard on the devices of this process. Any change to a single bit changes the checksum."""
    rows: list[tuple[str, str, str, jax.Array | int]] = []
    for path, array in flatten(state).items():
        for shard in array.addressable_shards:
            index = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
            place = "x".join(f"{a}:{b}" for a, b in index)
            rows.append((path, place, str(shard.device), _checksum(shard.data)))
    values = jax.device_get([value for *_, value in rows])
    return [(p, place, device, int(v)) for (p, place, device, _), v in zip(rows, values, strict=True)]


def compare_replicas(processes: Sequence[tuple[int, str, Sequence[Any]]]) -> list[str]:
    """Return a line for each device with a shard that differs from its replicas.

    If most replicas agree, report only the devices that disagree with them.
    """
    groups: defaultdict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    for process, host, rows in processes:
        for path, place, device, value in rows:
            groups[path, place].append((f"process {process} on {host}: device {device}", value))
    problems = []
    for (path, place), holders in groups.items():
        counts = Counter(value for _, value in holders)
        if len(counts) == 1:
            continue
        (common, most), *rarer = counts.most_common()
        clear = most > rarer[0][1]
        names = [name for name, value in holders if not clear or value != common]
        among = "" if clear else " (no majority)"
        problems += [
            f"{name}: {path}{f'[{place}]' if place else ''} differs from its replicas{among}" for name in names
        ]
    return problems


def _report_differences(facts: Sequence[Any]) -> list[str]:
    """Return at most 13 lines about all processes: their reruns that differ, and their replicas that differ."""
    differences = [f"process {p} on {host}: {line}" for p, (host, lines, _) in enumerate(facts) for line in lines]
    differences += compare_replicas([(p, host, row_list) for p, (host, _, row_list) in enumerate(facts)])
    more = [f"and {len(differences) - 12} more"] if len(differences) > 12 else []
    return [*differences[:12], *more]


def _compare_reruns(first: Sequence[Row], second: Sequence[Row]) -> list[str]:
    """Return a line for each device with arrays that differed in the second run."""
    paths_by_device: defaultdict[str, list[str]] = defaultdict(list)
    for (path, _, device, one), (*_, two) in zip(first, second, strict=True):
        if one != two:
            paths_by_device[device].append(path)
    more = {
        device: f" and {counted(len(paths) - 1, 'more array')}"
        for device, paths in paths_by_device.items()
        if paths[1:]
    }
    return [
        f"device {device}: {paths[0]}{more.get(device, '')} differed in the second run"
        for device, paths in paths_by_device.items()
    ]


_BITS: Mapping[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _checksum(data: jax.Array) -> jax.Array | int:
    """Return the sum of all elements' bits, each multiplied by a different odd number, modulo 2**32.

    Runs on the device of `data`.
    """
    size = data.dtype.itemsize
    if not data.size:
        return 0
    if size not in _BITS or data.dtype == jnp.bool_ or not isinstance(data, jax.Array):
        return zlib.crc32(np.asarray(data).tobytes())
    bits = lax.bitcast_convert_type(data, _BITS[size]).reshape(-1).astype(jnp.uint32)
    with jax.default_device(next(iter(data.devices()))):
        factors = lax.iota(jnp.uint32, bits.size) * np.uint32(_MULTIPLIER) | np.uint32(1)
    return jnp.sum(bits * factors, dtype=jnp.uint32)
