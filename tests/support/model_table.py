"""The table of `docs/models.md`: what works for each `model_type`. Run it to write the table anew:

PYTHONPATH=tests uv run python -m support.model_table
"""

import inspect
import re
from collections.abc import Mapping

from axlearn_core.plugins.registry import registry
from axlearn_plugins_models.huggingface.family import families, family, find_family
from support.paths import ROOT

PAGE = ROOT / "docs/models.md"
COLUMNS = ("import", "generate", "serve", "train", "lora", "quantize", "export", "plan")
REFUSED: Mapping[tuple[str, str], str] = {}
"""(model_type, column) -> why it is refused."""
IMAGES = {"vit"}
"""Types without text, which have tests of their own."""
BEGIN, END = "<!-- table: tests/support/model_table.py -->\n", "<!-- end of the table -->\n"


def text_types() -> list[str]:
    """Every `model_type` of a language model."""
    return sorted({*families()} - IMAGES)


def experiments() -> dict[str, list[str]]:
    """model_type -> the experiments whose models can be exported in its format."""
    result: dict[str, list[str]] = {}
    for entry in registry().entries("experiments"):
        config = registry().experiment(entry.name)
        if hasattr(config.model, "decoder"):
            result.setdefault(find_family(config)[0].model_type, []).append(entry.name)
    same = {name: kind for name in families() if (kind := family(name).equivalent)}
    return result | {name: result[kind] for name, kind in same.items()}


def lines(model_type: str, names: list[str]) -> int:
    """Of code of a family and its experiments, without blank lines and imports; shared parts count where they are defined."""
    parts = [type(family(model_type)), *(registry().entry("experiments", name).load() for name in names)]
    return sum(sum(bool(line.strip()) for line in inspect.getsource(part).splitlines()) for part in parts)


def table() -> str:
    """The table, in Markdown."""
    used = experiments()
    head = ("`model_type`", "experiments", *COLUMNS)
    rows = [head, ("---", "---", *(":-:" for _ in COLUMNS))]
    for name in text_types():
        cells = ["no" if (name, column) in REFUSED else "yes" for column in COLUMNS]
        rows.append((f"`{name}`", ", ".join(f"`{e}`" for e in used.get(name, ())), *cells))
    notes = [f"- `{name}`, {column}: {why}" for (name, column), why in REFUSED.items()]
    return "\n".join(["", *(f"| {' | '.join(row)} |" for row in rows), "", *notes, *([""] if notes else [])])


def main() -> None:
    """Write the table into its page."""
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table()}{END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
