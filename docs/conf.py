"""Sphinx: the site made of `docs/` and of the README files of the examples. `uv run axlearn docs` builds and shows it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "axlearn"
author = "the axlearn authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"

# The source folder is the repository, so that pages keep the links between docs/ and examples/ that they have on a code host.
_FOLDERS = {
    "Examples": ("examples", "examples/*/README"),
    "Measurements": ("benchmarks", "benchmarks/results/*"),
}
_PROJECT = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
include_patterns = ["docs/**", *_PROJECT, *(f"{pattern}.md" for _, pattern in _FOLDERS.values())]
_READ = {"docs", *(folder for folder, _ in _FOLDERS.values())}
exclude_patterns = [p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in _READ]
exclude_patterns += ["docs/_*", "examples/*/src", "examples/*/tests", "benchmarks/baselines", "**/runs", "**/.*"]
suppress_warnings = [
    "misc.highlighting_failure",  # shown output that is not quite a language
    "ref.python",  # a type whose name two modules have: the signature shows it without a link
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "axlearn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_show_copyright = False  # the license says it
html_show_sphinx = False
html_domain_indices = False

autodoc_default_options = {"members": True, "member-order": "bysource", "exclude-members": "owner"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = "$ "

_SECTION = re.compile(r"(?m)^\*\*(?P<caption>[^*\n]+)\*\*$\n\n(?P<items>(?:^- .*\n|^ +.*\n)+)")
_LINK = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<path>[^)#]+)\)", re.M)


def add_navigation(app, docname, source):
    """Turns the lists of links of index.md into the site's navigation, so that there is one list to keep."""
    if docname != root_doc:
        return
    groups = [
        (section["caption"], [f"{m['title']} </{_document(m['path'])}>" for m in _LINK.finditer(section["items"])])
        for section in _SECTION.finditer(source[0])
    ]
    groups += [(caption, [f"/{pattern}"]) for caption, (_, pattern) in _FOLDERS.items()]
    trees = [
        "\n".join([":::{toctree}", ":hidden:", ":glob:", f":caption: {caption}", ":maxdepth: 1", "", *entries, ":::"])
        for caption, entries in groups
    ]
    source[0] += "\n\n" + "\n\n".join(trees) + "\n"


def _document(path: str) -> str:
    """The document of a link in docs/index.md."""
    file = (ROOT / "docs" / path).resolve().relative_to(ROOT)
    return str(file.with_suffix(""))


def as_rst(app, what, name, obj, options, lines):
    """Turns the Markdown of docstrings into reStructuredText: `code`, literal stars, and indented blocks of code."""
    out: list[str] = []
    code_indent = None  # of the block of code that the line is in
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip() and code_indent is not None and indent < code_indent:
            code_indent = None
        previous = next((x for x in reversed(lines[:i]) if x.strip()), "")
        deeper = indent >= len(previous) - len(previous.lstrip()) + 4
        if code_indent is None and line.strip() and i and not lines[i - 1].strip() and deeper:
            out += [" " * (indent - 4) + "::", ""]
            code_indent = indent
        out.append(line if code_indent is not None else _STARS.sub(r"\\\g<0>", line))
    text = "\n".join(out)
    lines[:] = _CODE.sub(lambda m: f"``{m[1].replace(chr(92), '')}``" + ("\\ " if m[2] else ""), text).split("\n")


_STARS = re.compile(r"[*|]|_(?=\W|$)")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(?=(\w?))")


def setup(app):
    """Connects the two functions above."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", as_rst, priority=400)
