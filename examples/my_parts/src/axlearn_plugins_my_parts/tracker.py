"""The `csv` component."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from axlearn_core.extend import Configurable, node, printable, writing

FILE, HEADER = "metrics.csv", ("step", "name", "value")


class CsvTracker(Configurable):
    """Writes a row of step, name and value to `metrics.csv` for each scalar and text."""

    @node
    class Config(Configurable.Config["CsvTracker"]):
        """Settings for `CsvTracker`. There are none."""

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.path, self.file = Path(run_dir) / FILE, None

    def start(self, info: Mapping[str, Any]) -> None:
        """Open the file. A resumed run keeps the rows up to its start step.

        Raises:
            WorkError: If the file cannot be written.
        """
        start_step = info.get("start_step", 0)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows = read_csv(self.path.parent) if start_step else []
            self.file: IO[str] | None = self.path.open("w", encoding="utf-8", newline="")
        self._write([HEADER, *(row for row in rows if row[0] <= start_step)])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row per value."""
        self._write([(step, name, float(value)) for name, value in values.items()])

    def text(self, step: int, name: str, value: str) -> None:
        """Write one row."""
        self._write([(step, name, printable(value))])

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _write(self, rows: list[Any]) -> None:
        assert self.file is not None, "call start first"
        with writing(self.path):
            csv.writer(self.file).writerows(rows)
            self.file.flush()


def read_csv(run_dir: Path) -> list[tuple[int, str, str]]:
    """Return the step, name and value of each row. Return [] if there is no file."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [(int(step), name, value) for step, name, value in list(csv.reader(file))[1:]]
