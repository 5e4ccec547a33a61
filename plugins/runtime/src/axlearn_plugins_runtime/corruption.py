"""The component `sdc-check`: silent data corruption, found by computing a step twice and by comparing replicas."""

import socket
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axlearn_core.checkpoint.barrier import gather_objects
from axlearn_core.config import Configurable, node, setting
from axlearn_core.errors import WorkError
from axlearn_core.learn.paths import flatten

_ODD = 2654435761
Row = tuple[str, str, str, int]
"""(path, place in the array, device, checksum)."""


class CorruptionCheck(Configurable):
    """Every so many steps: computes the step twice and compares the results bit by bit, then the replicas of all devices.

    A chip that computes wrongly now and then gives two results; one that always does differs from its replicas. Checksums are
    computed on the devices. While a step is computed twice, a second copy of the training state lies on them.
    """

    @node
    class Config(Configurable.Config["CorruptionCheck"]):
        """When, and what.

        Attributes:
            every_steps: a step is checked after each such number.
            rerun: compute it twice. The program has to be deterministic, as XLA's are but for flags that say otherwise.
            replicas: compare the arrays that several devices hold.
            wait_seconds: how long processes wait for each other's checksums.
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
            WorkError: results or replicas differ. Names process, host, device and array; nothing of the step is saved.
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
            problems += _reruns_that_differ(first, rows)
        replicas = [list(row) for row in rows] if self.cfg.replicas else []
        facts = gather_objects([socket.gethostname(), problems, replicas], "sdc-check", self.cfg.wait_seconds)
        differences = [f"process {p} on {host}: {line}" for p, (host, lines, _) in enumerate(facts) for line in lines]
        differences += compare_replicas([(p, host, own) for p, (host, _, own) in enumerate(facts)])
        if differences:
            report_lines = [
                *differences[:12],
                *([f"and {len(differences) - 12} more"] if len(differences) > 12 else []),
            ]
            raise WorkError(
                f"step {step} was not computed right: silent data corruption\n"
                + "\n".join(f"    {line}" for line in report_lines)
                + "\n    fix: take the machine named here out and run the same command again, which goes on from the newest "
                "checkpoint; with `--restore-step`, from an earlier one"
            )
        return state, scalars


def checksums(state: Any) -> list[Row]:
    """A checksum of each shard on the devices of this process. One bit that differs gives another one."""
    rows: list[tuple[str, str, str, jax.Array | int]] = []
    for path, array in flatten(state).items():
        for shard in array.addressable_shards:
            index = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
            place = "x".join(f"{a}:{b}" for a, b in index)
            rows.append((path, place, str(shard.device), _checksum(shard.data)))
    values = jax.device_get([value for *_, value in rows])
    return [(p, place, device, int(v)) for (p, place, device, _), v in zip(rows, values, strict=True)]


def compare_replicas(processes: Sequence[tuple[int, str, Sequence[Any]]]) -> list[str]:
    """What differs between devices that hold the same part of an array; where most agree, the others are named."""
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
        odd = [name for name, value in holders if not clear or value != common]
        among = "" if clear else " (no majority)"
        problems += [f"{name}: {path}{f'[{place}]' if place else ''} differs from its replicas{among}" for name in odd]
    return problems


def _reruns_that_differ(first: Sequence[Row], second: Sequence[Row]) -> list[str]:
    """A line for each device: which arrays came out otherwise the second time."""
    by_device: defaultdict[str, list[str]] = defaultdict(list)
    for (path, _, device, one), (*_, two) in zip(first, second, strict=True):
        if one != two:
            by_device[device].append(path)
    return [
        f"device {device}: {paths[0]}{f' and {len(paths) - 1} more arrays' if paths[1:] else ''} came out otherwise the second time"
        for device, paths in by_device.items()
    ]


_BITS: Mapping[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _checksum(data: jax.Array) -> jax.Array | int:
    """The sum of all elements' bits, each times an odd number of its own, modulo 2**32. Runs on the device of `data`."""
    size = data.dtype.itemsize
    if not data.size:
        return 0
    if size not in _BITS or data.dtype == jnp.bool_ or not isinstance(data, jax.Array):
        return zlib.crc32(np.asarray(data).tobytes())
    bits = lax.bitcast_convert_type(data, _BITS[size]).reshape(-1).astype(jnp.uint32)
    with jax.default_device(next(iter(data.devices()))):
        odd = lax.iota(jnp.uint32, bits.size) * np.uint32(_ODD) | np.uint32(1)
    return jnp.sum(bits * odd, dtype=jnp.uint32)
