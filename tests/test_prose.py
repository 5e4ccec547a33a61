"""Sentences in code and documentation stay plain: the averages of each folder must not rise.

A hard sentence often uses "where" for "if", or a clause in place of a noun ("What a step costs"). Every such construction
counts, weighted and relative to the length of the sentence. A high value is a reason to rewrite the sentence, not to replace
the word. Run `pytest tests/test_prose.py` to see the worst sentences of a folder that exceeds its limit.
"""

import ast
import io
import re
import tokenize

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.style

FOLDERS = (
    "axlearn_core", "axlearn_index", "axlearn_testing", "axlearn_plugins_cpu", "axlearn_plugins_gpu", "axlearn_plugins_neuron",
    "axlearn_plugins_tpu", *(f"plugins/{path.name}" for path in sorted((ROOT / "plugins").iterdir()) if path.is_dir()),
    "docs", "examples", "README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip
HARD = {
    r"\bwhere\b(?! to\b)": 2,  # for "if" or "when"
    r"^(?:of|what|whose|who|whether|where|which|how|that)\b": 2,  # a clause in place of a noun or verb
    r"\b(?:is|are|was|were) (?:no|none|said|told|asked for|given back)\b": 2,
    r"\bwhat (?:it|they|an?|the|is|are|was|were|else|this|that|has|have)\b": 2,
    r"\b(?:that|those) of\b": 2,
    r"\b(?:whatever|whichever|wherever|whoever)\b": 2,
    r"\bof (?:its|their|one's) own\b": 2,
    r"\b(?:besides?|anew|likewise|nobody|somebody|nowhere|all the same)\b": 1,
}
MOST_HARD, MOST_WHERE = 0.1, 0.3
SENTENCE = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z`(\[])")


def prose(path):
    """The docstrings, comments and messages of a module, or the text of a page."""
    source = path.read_text()
    if path.suffix == ".md":
        yield source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    comments = (
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    )
    yield from (token.string.lstrip("# ") for token in comments)


def sentences(text):
    """The sentences of a text with at least five words, without code blocks, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->|^ {4}.*?$|^\|.*?$|^#.*?$", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "CODE", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", text):
        yield from (part for part in SENTENCE.split(" ".join(paragraph.split())) if len(part.split()) >= 5)


def hardness(sentence):
    """The weight of hard constructions per ten words."""
    weight = sum(weight * len(re.findall(pattern, sentence, re.IGNORECASE)) for pattern, weight in HARD.items())
    return 10 * weight / max(10, len(sentence.split()))


def _files(folder):
    path = ROOT / folder
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix in (".py", ".md")]
    return [f for f in files if not {".venv", "node_modules", "__pycache__", "build"} & {*f.relative_to(ROOT).parts}]


@pytest.mark.parametrize(
    ("hard", "plain"),
    [
        ("None where there is none, or what is there is damaged.", "Returns None if the entry is missing or damaged."),
        ("What a run that has ended came to.", "The outcome of a finished run."),
        ("Whether the state of the step is that of the run.", "True if the run has reached the step."),
    ],
)
def test_hard_sentences_are_found(hard, plain):
    assert hardness(hard) > 1
    assert hardness(plain) == 0


@pytest.mark.slow_cases(
    "axlearn_core",
    "axlearn_testing",
    "docs",
    "plugins/finetune",
    "plugins/models",
    "plugins/plan",
    "plugins/runtime",
    "plugins/serving",
    "plugins/tools",
    "plugins/transformer",
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_plain(folder):
    collected = [sentence for file in _files(folder) for text in prose(file) for sentence in sentences(text)]
    assert collected, "the folder has no sentences"
    worst = "\n".join(f"{hardness(s):.1f} {s[:160]}" for s in sorted(collected, key=hardness, reverse=True)[:12])
    conditions = sum(len(re.findall(r"\b(?:if|when)\b", s, re.IGNORECASE)) for s in collected)
    where = sum(len(re.findall(r"\b[Ww]here\b", s)) for s in collected)  # not SQL
    assert sum(map(hardness, collected)) / len(collected) <= MOST_HARD, worst
    assert where <= max(2, MOST_WHERE * conditions), worst
