"""The jobs that people come with: the README and the landing page lead to a page for each, which starts with a command."""

import re

import pytest

from support import code_blocks
from support.paths import ROOT

JOBS = ("pretrain", "finetune", "serve", "plan", "plugin", "moving")
PAGES = [f"tutorials/{job}.md" for job in JOBS]
LINK = re.compile(r"\]\(([^)#]+)\)")


def section(text: str, start: str, end: str) -> str:
    """Return the text between two markers that both occur once."""
    assert text.count(start) == 1, start
    return text.split(start)[1].split(end)[0]


def test_the_landing_page_starts_with_the_jobs():
    text = (ROOT / "docs/index.md").read_text("utf-8")
    jobs = section(text, "**Start here**\n", "\nAll commands")
    assert LINK.findall(jobs) == PAGES
    assert not re.search(r"^- ", text.split("**Start here**")[0], re.M), "the site shows the first list as cards"


def test_the_readme_leads_to_the_same_jobs():
    table = section((ROOT / "README.md").read_text("utf-8"), "## What next\n", "\n- ")
    assert LINK.findall(table) == [f"docs/{page}" for page in PAGES]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_of_a_job(page):
    """A page opens with one command and ends with links to what comes next."""
    file = ROOT / "docs" / page
    opening = file.read_text("utf-8").partition("\n## ")[0]
    first = code_blocks.read(file)[0]
    assert first.kind == "bash"
    assert first.text in opening, f"{first.location}: the first command comes after the first heading"
    assert first.text.startswith(("axlearn ", "cd examples/"))
    assert len(first.text.splitlines()) == 1
    following = file.read_text("utf-8").partition("\n## What next\n")[2]
    assert len(re.findall(r"^- ", following, re.M)) >= 2, "no next steps"
    assert "\n## " not in following, "the next steps come last"


def test_the_readme_says_what_is_proven_before_its_first_heading():
    opening = (ROOT / "README.md").read_text("utf-8").partition("\n## ")[0]
    rows = [line.split(" | ")[0].strip("| ") for line in opening.splitlines() if line.startswith("| ")]
    assert rows[0] == "hardware"
    for name in ("CPU", "NVIDIA", "TPU", "Trainium"):
        assert any(name in row for row in rows), f"no row for {name}"
    kinds = [(block.kind, block.text) for block in code_blocks.read(ROOT / "README.md") if block.text in opening]
    assert [kind for kind, _ in kinds] == ["bash"], "one command"
    assert opening.count("![") + opening.count("<img ") == 1, "one picture"
