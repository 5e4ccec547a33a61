"""List the machines of a search from `--target` and `--chips`. Does not import JAX."""

import re

from axlearn_core.contracts.target import Machine
from axlearn_core.errors import RequestError
from axlearn_core.plugins.targets import find_machine, targets

MAX_MACHINES = 16


def machine_names(target: str | None, chips: str | None) -> list[str]:
    """Return the names of the machines, without duplicates, in command-line order.

    Args:
        target: Machine names, separated by commas.
        chips: Range `A..B`. If set, search all chip counts in this range that are powers of two, instead of the sizes in the
            names.

    Raises:
        RequestError: The target is missing or unknown, or no machine has a size in the range.
    """
    names = [t.strip() for t in (target or "").split(",") if t.strip()]
    if not names:
        examples = sorted({e for _, t in targets().values() if t.peak_flops for e in t.examples})
        raise RequestError(
            f"a search needs a target machine\n    fix: add --target NAME[,NAME...], such as {', '.join(examples[:6])}"
        )
    machines = [find_machine(t) for t in names]
    if chips is None:
        return list(dict.fromkeys(m.name for m in machines))
    low, high = chip_range(chips)
    size_names = [s.name for m in machines for s in sizes(m, low, high)]
    if not size_names:
        raise RequestError(
            f"no machine has a size in the range of --chips\n    got: --chips {chips} for {', '.join(names)}\n"
            "    expected: a range that contains a size of the target (a power of two)"
        )
    return list(dict.fromkeys(size_names))[:MAX_MACHINES]


def chip_range(text: str) -> tuple[int, int]:
    """Parse a range such as `64..512`. Raise `RequestError` if it is invalid."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    low, high = (int(n) for n in match.groups()) if match else (0, 0)
    if not match or not 0 < low <= high:
        raise RequestError(f"--chips expects a range A..B, such as 64..512\n    got: {text!r}")
    return low, high


def sizes(machine: Machine, low: int, high: int) -> list[Machine]:
    """Return the machines with the same target whose chip counts are powers of two between `low` and `high`, inclusive.

    GPU machines keep their number of chips per host.
    """
    target, names = machine.target, []
    chips = 1
    while chips <= high:
        if chips >= low and chips % (machine.chips_per_host if target.size == "hosts" else 1) == 0:
            domains = chips // machine.chips_per_host if target.size == "hosts" else 1
            size = target.make_machine(chips * target.devices_per_chip, domains)
            if size is not None:
                names.append(size)
        chips *= 2
    return names
