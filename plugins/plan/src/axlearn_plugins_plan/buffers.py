"""How a compiler laid out its buffers in a device's memory, as XLA writes it down when it is asked to (`xla_dump_to`).

For TPUs the statistics of a compiled program (`memory_analysis`) say more than the program takes: of Llama 2 70B on TPU v5p
120.9 GiB, where libtpu had laid all buffers out in 94.8 GiB and compiled it for a chip of 95.7. What libtpu refuses, it refuses by
its own layout of buffers, which is what is read here.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

OPTION = "xla_dump_to"
_FILES = "*buffer-assignment.txt"
_LINE = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.M)
_ELSEWHERE = re.compile(r"\bcolor [1-9]")
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
    """Where a compiler writes. It is empty, or holds one program's files."""

    directory: Path

    @property
    def options(self) -> Mapping[str, str]:
        """For the compiler."""
        return {OPTION: str(self.directory)}

    def read(self) -> Buffers | None:
        """What it wrote of its buffers last; None where it wrote nothing of them."""
        files = sorted(self.directory.glob(_FILES), key=lambda path: path.stat().st_mtime)
        return read(files[-1].read_text("utf-8", errors="replace")) if files else None


@contextmanager
def dump() -> Iterator[Dump]:
    """A directory for one compilation, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="axlearn-plan-") as directory:
        yield Dump(directory=Path(directory))


def read(text: str) -> Buffers | None:
    """The buffers of XLA's text of a buffer assignment; None where it has none."""
    arguments = temporaries = allocations = 0
    for size, rest in _LINE.findall(text):
        allocations += 1
        if _ELSEWHERE.search(rest):
            continue
        if ", parameter " in rest:
            arguments += int(size)
        else:
            temporaries += int(size)
    return Buffers(arguments=arguments, temporaries=temporaries) if allocations else None
