"""The machines that a search looks at: those that --target names, and with --chips their other sizes. Imports no JAX."""

import re

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import find_machine, targets

MOST_MACHINES = 16


def machine_names(target: str | None, chips: str | None) -> list[str]:
    """The names of machines, in the order of the command line, each once.

    Args:
        target: names joined by commas.
        chips: `A..B`, to take every power of two of chips in this range instead of the sizes that the names have.

    Raises:
        RequestError: no machine is named, one is not known, or none has so many chips.
    """
    names = [t.strip() for t in (target or "").split(",") if t.strip()]
    if not names:
        examples = sorted({e for _, t in targets().values() if t.peak_flops for e in t.examples})
        raise RequestError(
            "a search is for some hardware, and none is named\n"
            f"    fix: add --target NAME[,NAME...], such as {', '.join(examples[:6])}"
        )
    machines = [find_machine(t) for t in names]
    if chips is None:
        return list(dict.fromkeys(m.name for m in machines))
    low, high = chip_range(chips)
    size_names = [s.name for m in machines for s in sizes(m, low, high)]
    if not size_names:
        raise RequestError(
            f"no machine has that many chips\n    got: --chips {chips} of {', '.join(names)}\n"
            "    expected: a range with a power of two in it that the target has"
        )
    return list(dict.fromkeys(size_names))[:MOST_MACHINES]


def chip_range(text: str) -> tuple[int, int]:
    """`64..512` as numbers; raises `RequestError` where it is not a range."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    low, high = (int(n) for n in match.groups()) if match else (0, 0)
    if not match or not 0 < low <= high:
        raise RequestError(f"--chips takes a range A..B, such as 64..512\n    got: {text!r}")
    return low, high


def sizes(machine: Machine, low: int, high: int) -> list[Machine]:
    """The machines of the same target whose chips are a power of two from `low` to `high`; GPUs on hosts of as many."""
    target, names = machine.target, []
    chips = 1
    while chips <= high:
        if chips >= low and chips % (machine.chips_per_host if target.size == "hosts" else 1) == 0:
            domains = chips // machine.chips_per_host if target.size == "hosts" else 1
            size = target.machine_of(chips * target.devices_per_chip, domains)
            if size is not None:
                names.append(size)
        chips *= 2
    return names
