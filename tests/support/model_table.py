"""The table of `docs/models.md`: what works for each `model_type`, and how long families are. Run it to rewrite the table:

PYTHONPATH=tests uv run python -m support.model_table
"""

import ast
import importlib
import inspect
import re

from axlearn_core.config.tree import children
from axlearn_core.plugins.registry import registry
from axlearn_plugins_models.huggingface.family import PREFIX, families, find_family
from support.benchmark_scripts import load_benchmark
from support.paths import ROOT

PAGE = ROOT / "docs/models.md"
COLUMNS = ("import", "generate", "serve", "train", "lora", "quantize", "export", "plan")
IMAGES = {"vit"}
"""Image models, which other tests cover."""
NEW_LAYERS = {
    "bamba": "Mamba-2",
    "deepseek_v32": "a top-k indexer",
    "gemma3n_text": "several residual streams, per-layer embeddings",
    "gemma4_text": "per-layer embeddings, experts beside a dense layer",
    "gpt_oss": "sinks, clamped gates",
    "granitemoehybrid": "Mamba-2",
    "kimi_linear": "Kimi delta attention",
    "lfm2": "short convolutions",
    "llama4_text": "chunked attention, weights on the inputs of experts",
    "nemotron_h": "Mamba-2, layers with one half",
    "olmo_hybrid": "Gated DeltaNet",
    "qwen3_5_moe_text": "Gated DeltaNet",
    "qwen3_5_text": "Gated DeltaNet",
    "qwen3_next": "Gated DeltaNet",
}
"""Types with layers that Llama-like models do not have -> these layers."""
MAX_LINES = 60
"""Maximum number of lines of a family without new layers."""
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


def lines(model_type: str) -> int:
    """Count the lines of a family's table and of one experiment: their modules, divided by the families and experiments in them.

    Blank lines, imports and the docstring of a module do not count.
    """
    entry = registry().entry("components", PREFIX + model_type)
    table_module = entry.value.partition(":")[0]
    package = table_module.rpartition(".")[0]
    types = [n for n in text_types() if registry().entry("components", PREFIX + n).value.startswith(f"{table_module}:")]
    names = [e.name for e in registry().entries("experiments") if e.value.startswith(f"{package}.")]
    experiments_module = registry().entry("experiments", names[0]).value.partition(":")[0]
    return round(_code_lines(table_module) / len(types) + _code_lines(experiments_module) / len(names))


def _code_lines(module: str) -> int:
    source = inspect.getsource(importlib.import_module(module))
    skipped: set[int] = set()
    for i, statement in enumerate(ast.parse(source).body):
        docstring = i == 0 and isinstance(statement, ast.Expr)
        if docstring or isinstance(statement, (ast.Import, ast.ImportFrom)):
            skipped |= {*range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)}
    return sum(bool(line.strip()) for i, line in enumerate(source.splitlines(), 1) if i not in skipped)


def table() -> str:
    """The table, in Markdown."""
    used, published = experiments(), load_benchmark("published_plans")
    plans = {"GPU": published.TARGETS, "TPU": published.TPU_TARGETS}
    head = ("`model_type`", "experiments", *COLUMNS, "lines")
    rows = [head, ("---", "---", *(":-:" for _ in COLUMNS), "--:")]
    for name in text_types():
        cells = ["yes" for _ in COLUMNS[:-1]]
        planned = [kind for kind, targets in plans.items() if {*targets} & {*used.get(name, ())}]
        cells.append(" and ".join(planned) or "not yet")
        rows.append((f"`{name}`", ", ".join(f"`{e}`" for e in used.get(name, ())), *cells, f"{lines(name)}"))
    return "\n".join(["", *(f"| {' | '.join(row)} |" for row in rows), ""])


def main() -> None:
    """Rewrite the table in its page."""
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table()}{END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
