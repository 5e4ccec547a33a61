"""Code blocks of Markdown pages, and the test options in the comments above them.

    <!-- test: slow -->            only among the slow tests
    <!-- test: skip REASON -->     not at all
    <!-- test: exit 2 -->          the command has to end with this exit code
    <!-- test: model FOLDER -->    the page begins with a downloaded model in this folder

A `text` block right after a `bash` or `python` block is what that block prints (`...` stands for anything). A `yaml` block
whose first line is `# NAME.yaml` is that file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_MARK = re.compile(r"<!-- test: (slow|skip|exit|model)\s*(.*?)\s*-->\s*\Z")
_FILE = re.compile(r"# (\S+\.yaml)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    kind: str
    text: str
    location: str
    mark: str = ""
    argument: str = ""
    expected: str | None = None

    @property
    def file(self) -> str | None:
        """The file that a YAML block stands for."""
        match = _FILE.match(self.text) if self.kind == "yaml" else None
        return match[1] if match else None

    @property
    def exit_code(self) -> int:
        """What the commands have to end with."""
        return int(self.argument) if self.mark == "exit" else 0


def read(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    source = page.read_text("utf-8")
    blocks: list[Block] = []
    end = 0
    for match in _FENCE.finditer(source):
        kind, text = match.groups()
        between, end = source[end : match.start()], match.end()
        if kind == "text" and blocks and not between.strip() and blocks[-1].kind in ("bash", "python"):
            blocks[-1] = Block(**{**vars(blocks[-1]), "expected": text})
            continue
        mark = _MARK.search(between)
        location = f"{page.name}:{source.count(chr(10), 0, match.start()) + 1}"
        blocks.append(Block(kind, text, location, *(mark.groups() if mark else ())))
    return blocks


def agrees(expected: str, printed: str) -> bool:
    """Whether `printed` is what the page shows."""
    lines = [re.escape(line.rstrip()).replace(r"\.\.\.", ".*") for line in expected.strip().splitlines()]
    actual = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return re.fullmatch("\n".join(lines), actual, re.S) is not None
