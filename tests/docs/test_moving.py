"""The words that the page for newcomers from other frameworks gives for their options are words that are taken."""

import re

import pytest

from axlearn_core.plugins.resolve import resolve
from support.paths import ROOT

PAGE = ROOT / "docs/tutorials/moving.md"
ROWS = [line.split(" | ")[1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
WORD = re.compile(r'--(set|with) (?:"([^"]+)"|([^\s`]+))')
WORDS = sorted({tuple((kind, a or b) for kind, a, b in WORD.findall(row)) for row in ROWS} - {()})


def test_the_page_has_many_of_them():
    assert len(WORDS) > 35


@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(w for _, w in words))
def test_the_words_are_taken(words):
    # What only a user knows, such as data, is left open: paths, values and options are checked.
    settings, features = ([w for k, w in words if k == kind] for kind in ("set", "with"))
    assert resolve("llama2-7b", with_=features, set=settings).config
