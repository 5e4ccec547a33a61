"""How a compiler laid out its buffers in a device's memory, as XLA writes it down when it is asked to (`xla_dump_to`).

For TPUs the statistics of a compiled program (`memory_analysis`) say more than the program takes: of Llama 2 70B on TPU v5p
120.9 GiB, where libtpu had laid all buffers out in 94.8 GiB and compiled it for a chip of 95.7. What libtpu refuses, it refuses by
its own layout of buffers, which is what is read here.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from axlearn_plugins_plan.scratch import scratch_directory

OPTION = "xla_dump_to"
_FLAG = re.compile(rf"--{OPTION}=(\S+)")
_FILES = "*buffer-assignment.txt"
_LINE = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.M)
_OTHER_MEMORY = re.compile(r"\bcolor [1-9]")
"""A color is a space of memory: none, or 0, is the device's main memory; others are on the chip, or the host's memory."""


@attrs.frozen(kw_only=True)
class Buffers:
    """Bytes of one device's main memory.

    Attributes:
        arguments: of the program, those in the host's memory left out.
        temporaries: everything else that it lays out: one heap, and what has a place of its own.
    """

    arguments: int
    temporaries: int


@attrs.frozen(kw_only=True)
class Dump:
    """Where a compiler writes.

    Attributes:
        directory: of its files, which others may write to as well.
        options: for the compiler, so that it does; empty where it does by itself.
        earlier: file -> when it was written, of those that were there before.
    """

    directory: Path
    options: Mapping[str, str] = {}
    earlier: Mapping[Path, int] = {}

    def read(self) -> Buffers | None:
        """The latest buffers that were written since; None without any."""
        latest = [(time, path) for path, time in _times(self.directory).items() if self.earlier.get(path) != time]
        return parse_buffers(max(latest)[1].read_text("utf-8", errors="replace")) if latest else None


def _times(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.glob(_FILES)}


@contextmanager
def open_dump(options: Mapping[str, Any]) -> Iterator[Dump]:
    """A directory for one compilation: that of the compiler's options, or of `XLA_FLAGS`, else one that is removed afterwards.

    Args:
        options: that the compiler gets in any case.
    """
    flag = _FLAG.search(os.environ.get("XLA_FLAGS", ""))
    own = options.get(OPTION) or (flag.group(1) if flag else None)
    if own:
        directory = Path(str(own))
        yield Dump(directory=directory, earlier=_times(directory))
        return
    with scratch_directory() as temporary:
        yield Dump(directory=temporary, options={OPTION: str(temporary)})


def parse_buffers(text: str) -> Buffers | None:
    """The buffers of XLA's text of a buffer assignment; None where it has none."""
    arguments = temporaries = allocations = 0
    for size, rest in _LINE.findall(text):
        allocations += 1
        if _OTHER_MEMORY.search(rest):
            continue
        if ", parameter " in rest:
            arguments += int(size)
        else:
            temporaries += int(size)
    return Buffers(arguments=arguments, temporaries=temporaries) if allocations else None
