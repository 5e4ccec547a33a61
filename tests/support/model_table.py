"""The table of `docs/models.md`: what works for each `model_type`. Run it to rewrite the table, and to print how long families are:

PYTHONPATH=tests uv run python -m support.model_table
"""

import inspect
import re

from axlearn_core.config.tree import children
from axlearn_core.plugins.registry import registry
from axlearn_plugins_models.huggingface.family import families, family, find_family
from support.benchmark_scripts import load_benchmark
from support.paths import ROOT

PAGE = ROOT / "docs/models.md"
COLUMNS = ("import", "generate", "serve", "train", "lora", "quantize", "export", "plan")
IMAGES = {"vit"}
"""Image models, which other tests cover."""
BEGIN, END = "<!-- table: tests/support/model_table.py -->\n", "<!-- end of the table -->\n"


def text_types() -> list[str]:
    """Every `model_type` of a language model."""
    return sorted({*families()} - IMAGES)


def experiments() -> dict[str, list[str]]:
    """model_type -> its experiments."""
    result: dict[str, list[str]] = {}
    types = text_types()
    for entry in registry().entries("experiments"):
        named = [name for name in re.findall(r'"(\w+)"', inspect.getsource(entry.load())) if name in types]
        if named:
            result.setdefault(named[0], []).append(entry.name)
        elif "decoder" in children(registry().experiment(entry.name).model):
            result.setdefault(find_family(registry().experiment(entry.name))[0].model_type, []).append(entry.name)
    return result


def lines(model_type: str, names: list[str]) -> int:
    """Count the lines of a family's class and its experiments, without blank lines, imports and base classes."""
    parts = [type(family(model_type)), *(registry().entry("experiments", name).load() for name in names)]
    return sum(sum(bool(line.strip()) for line in inspect.getsource(part).splitlines()) for part in parts)


def table() -> str:
    """The table, in Markdown."""
    used, published = experiments(), load_benchmark("published_plans")
    plans = {"GPU": published.TARGETS, "TPU": published.TPU_TARGETS}
    head = ("`model_type`", "experiments", *COLUMNS)
    rows = [head, ("---", "---", *(":-:" for _ in COLUMNS))]
    for name in text_types():
        cells = ["yes" for _ in COLUMNS[:-1]]
        planned = [kind for kind, targets in plans.items() if {*targets} & {*used.get(name, ())}]
        cells.append(" and ".join(planned) or "not yet")
        rows.append((f"`{name}`", ", ".join(f"`{e}`" for e in used.get(name, ())), *cells))
    return "\n".join(["", *(f"| {' | '.join(row)} |" for row in rows), ""])


def main() -> None:
    """Rewrite the table in its page, and print the number of lines of each family."""
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table()}{END}", text, flags=re.DOTALL))
    used = experiments()
    for name in text_types():
        print(name, lines(name, used.get(name, [])))


if __name__ == "__main__":
    main()
