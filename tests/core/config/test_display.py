"""How configs and their differences look in a console and in a notebook."""

from html.parser import HTMLParser
from typing import Any

import optax
import pytest

from axlearn_core.config import REQUIRED, Configurable, Node, configure, diff, interface, node, patch, setting
from axlearn_core.config.display import WIDTH, exact_repr
from axlearn_core.config.types import show


class Small(Configurable):
    @node
    class Config(Configurable.Config["Small"]):
        dim: int = interface()
        size: int = 3
        text: str = ""
        steps: int = 1


class Large(Configurable):
    @node
    class Config(Configurable.Config["Large"]):
        label: str = setting(default="", label=True)
        first: Node[Any] = Small.Config()
        many: tuple[Node[Any], ...] = ()
        named: dict[str, Any] = setting(default={})
        ratio: float = 0.5
        needed: int = REQUIRED


LONG = "a long text that does not fit beside its parents on one line of the console"


def test_a_small_config_is_the_call_that_makes_it():
    assert repr(Small.Config()) == "Small.Config()"
    assert str(Small.Config(size=4, text="a")) == "Small.Config(size=4, text='a')"
    assert repr(Small.Config(dim=8)) == "Small.Config(dim=8)"  # what a parent offered
    assert repr(Large.Config()) == "Large.Config(needed=REQUIRED)"
    assert eval(repr(Small.Config(size=4))) == Small.Config(size=4)


def test_a_large_config_is_a_tree_of_what_differs():
    cfg = Large.Config(
        first=Small.Config(text=LONG, steps=2),
        many=(Small.Config(size=9), Small.Config(text=LONG)),
        named={"a": Small.Config(), "b": 1},
        needed=5,
    )
    assert repr(cfg).splitlines() == [
        "Large.Config",
        "  first: Small.Config",
        f"    text: '{LONG}'",
        "    steps: 2",
        "  many:",
        "    - Small.Config(size=9)",
        "    - Small.Config",
        f"      text: '{LONG}'",
        "  named: {a: Small.Config(), b: 1}",
        "  needed: 5",
    ]


def test_a_configured_function_is_a_call_of_configure():
    assert repr(configure(optax.lion, learning_rate=0.1)).endswith("lion, learning_rate=0.1)")
    assert repr(configure(optax.lion)).startswith("configure(optax")


def test_messages_stay_on_one_line():
    cfg = Large.Config(first=Small.Config(text=LONG), many=(Small.Config(text=LONG),))
    assert "\n" in repr(cfg)
    assert "\n" not in show(cfg)
    assert "\n" not in show((cfg, cfg))


def test_names_of_runs_do_not_depend_on_how_configs_look():
    exact = exact_repr((Small.Config(size=4), 1))
    assert exact == "(Small.Config(dim=REQUIRED, size=4, text='', steps=1), 1)"
    assert repr(Small.Config(size=4)) == "Small.Config(size=4)"  # afterwards, too


def test_differences_are_lines():
    old = Large.Config(needed=1)
    new = patch(old, {"first": Small.Config(size=7), "named": {"x": 1}, "needed": 2})
    changes = diff(old, new)
    assert str(changes).splitlines() == [
        "~ first.size: 3 -> 7",
        "+ named.x: 1",
        "~ needed: 1 -> 2",
        "- named: {}",
    ]
    assert str(changes[0]) == "~ first.size: 3 -> 7"
    assert str(diff(old, old)) == "(no changes)"
    assert changes == tuple(changes)


class _Parts(HTMLParser):
    """Collects elements and text, and checks that elements are nested correctly."""

    def __init__(self, source):
        super().__init__()
        self.open, self.seen, self.words = [], [], []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


EVIL = "</details><script>alert('1')</script>&amp;\""


def test_a_config_in_a_notebook_folds_and_escapes():
    parts = _Parts(Large.Config(first=Small.Config(text=EVIL), named={EVIL: EVIL}, needed=5)._repr_html_())
    assert {tag for tag, _ in parts.seen} == {"div", "style", "details", "summary", "b"}
    assert repr(EVIL) in parts.words
    folded = [attributes for tag, attributes in parts.seen if tag == "details"]
    assert "open" in folded[0]
    assert any(a.get("class") == "dim" and "open" not in a for a in folded)  # the defaults
    assert "2 defaults" in parts.words  # of `first`


def test_differences_in_a_notebook_fold_and_escape():
    old = Large.Config(needed=1)
    few = diff(old, patch(old, {"first.text": EVIL}))
    parts = _Parts(few._repr_html_())
    assert {tag for tag, _ in parts.seen} == {"div", "style", "details", "summary", "table", "tr", "th", "td", "span"}
    assert "1 change" in parts.words
    assert "open" in dict(parts.seen)["details"]
    many = diff(old, patch(old, {"named": {f"k{i}": i for i in range(50)}}))
    assert "open" not in dict(_Parts(many._repr_html_()).seen)["details"]


def test_a_label_affects_nothing_but_is_kept():
    cfg = Large.Config(needed=1)
    named = patch(cfg, {"label": "mine"})
    assert (named.label, named == cfg, hash(named) == hash(cfg), diff(cfg, named)) == ("mine", True, True, ())
    assert patch(named, {"ratio": 0.1}).label == "mine"
    assert repr(named) == "Large.Config(label='mine', needed=1)"


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH, WIDTH + 1])
def test_a_line_is_never_wider_than_it_may_be(width):
    length = width - len(repr(Small.Config(text="!"))) + 1
    text = repr(Small.Config(text="!" * length))
    assert ("\n" in text) == (width > WIDTH)
    assert text.count("!") == length
