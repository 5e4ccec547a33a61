"""Read the compiler's buffer assignment, which XLA writes if `xla_dump_to` is set.

On TPUs, the `memory_analysis` of a compiled program overstates its memory. For Llama 2 70B on TPU v5p it reports 120.9 GiB,
but libtpu fit all buffers into 94.8 GiB and compiled the program for a chip with 95.7 GiB. libtpu rejects programs based on its
buffer assignment, so a plan reads the same assignment.
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
"""A color is a memory space. Main memory has color 0 or no color. Other colors are on-chip or host memory."""


@attrs.frozen(kw_only=True)
class Buffers:
    """Bytes in the main memory of one device.

    Attributes:
        arguments: Bytes of the program's arguments, excluding those in host memory.
        temporaries: Bytes of all other allocations, which are a heap and some separate buffers.
    """

    arguments: int
    temporaries: int


@attrs.frozen(kw_only=True)
class Dump:
    """The dump of one compilation.

    Attributes:
        directory: Directory of the dump. Other processes may write to it too.
        options: Compiler options that enable the dump. Empty if the dump is already enabled.
        earlier: File -> modification time, for the files that existed before the compilation.
    """

    directory: Path
    options: Mapping[str, str] = {}
    earlier: Mapping[Path, int] = {}

    def read(self) -> Buffers | None:
        """Parse the latest buffer assignment of this compilation, or return None if the compiler wrote no file."""
        latest = [(time, path) for path, time in _times(self.directory).items() if self.earlier.get(path) != time]
        return parse_buffers(max(latest)[1].read_text("utf-8", errors="replace")) if latest else None


def _times(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.glob(_FILES)}


@contextmanager
def open_dump(options: Mapping[str, Any]) -> Iterator[Dump]:
    """Open a dump directory for one compilation.

    Uses the dump directory set in the compiler options or in `XLA_FLAGS`, or a temporary directory if neither sets one.

    Args:
        options: Compiler options for the compilation.
    """
    flag = _FLAG.search(os.environ.get("XLA_FLAGS", ""))
    named = options.get(OPTION) or (flag.group(1) if flag else None)
    if named:
        directory = Path(str(named))
        yield Dump(directory=directory, earlier=_times(directory))
        return
    with scratch_directory() as temporary:
        yield Dump(directory=temporary, options={OPTION: str(temporary)})


def parse_buffers(text: str) -> Buffers | None:
    """Parse the text of a buffer assignment. Return None if it has no allocations."""
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
