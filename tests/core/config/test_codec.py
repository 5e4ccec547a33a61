"""Trees to YAML and back: nothing is coerced, nothing is lost, every problem has its path and line."""

import enum
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axlearn_core.config import (
    REQUIRED,
    Configurable,
    Decoder,
    Node,
    Scaled,
    configure,
    dump,
    encode,
    interface,
    node,
    parse,
    patch,
    setting,
)  # fmt: skip
from axlearn_core.config.callable_node import configured_class
from axlearn_core.config.tree import config_class
from axlearn_core.errors import ConfigError, RequestError, unknown


class Kind(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


def schedule(peak: float, steps: int = 10):
    return (peak, steps)


def optimizer(rate: Any = 1e-3, b1: float = 0.9, dtype: Any = float, betas: Any = [1, 2], *, rngs: int):  # noqa: B006
    return (rate, b1, dtype, betas, rngs)


class Leaf(Configurable):
    @node
    class Config(Configurable.Config["Leaf"]):
        dim: int = interface()
        size: int | Node[int] = 4
        rate: float = setting(default=0.5, gt=0)
        kind: Kind = Kind.FAST
        text: str | None = None


class Root(Configurable):
    @node
    class Config(Configurable.Config["Root"]):
        leaf: Node[Any] = Leaf.Config()
        exact: Leaf.Config = Leaf.Config()
        maybe: Node[Any] | None = None
        leaves: tuple[Node[Any], ...] = ()
        table: Mapping[str, Node[Any]] = {}
        pair: tuple[int, str] = (1, "a")
        paths: str | tuple[str, ...] = ()
        rates: Mapping[str, float] | None = None
        anything: Any = None
        needed: int = REQUIRED


class Known:
    """Names in a mapping."""

    def __init__(self, **components: Any):
        self.classes = {
            k: config_class(v) if isinstance(v, type) else configured_class(v) for k, v in components.items()
        }

    def component(self, name: str) -> type[Node[Any]]:
        if name not in self.classes:
            raise unknown("component", name, self.classes)
        return self.classes[name]

    def get_name(self, cls: type) -> str:
        for name, registered_class in self.classes.items():
            if registered_class is cls:
                return name
        raise RequestError(f"{cls} has no name")


NAMES = Known(root=Root, leaf=Leaf, scaled=Scaled, schedule=schedule, optimizer=optimizer)
DECODER = Decoder(NAMES)


def there_and_back(tree: Any) -> Any:
    return DECODER.decode(parse(dump(encode(tree, NAMES))).data, Node)


def test_everything_goes_there_and_back():
    tree = Root.Config(
        leaf=Leaf.Config(size=Scaled(factor=8 / 3, multiple_of=8), rate=1e-7, kind=Kind.SLOW, text="no"),
        exact=Leaf.Config(size=1),
        maybe=Scaled(),
        leaves=(Leaf.Config(text="1e-4"), Scaled(factor=2.0)),
        table={"a": Leaf.Config(), "b.c": Scaled()},
        pair=(3, "~"),
        paths=("x", "y"),
        rates={"a": 1.0, "b": 2.0},
        anything={"k": [1, "two", None, True, {"x": 2.5}], "node": Leaf.Config(text="in")},
        needed=3,
    )
    again = there_and_back(tree)
    assert again == tree
    assert hash(again) == hash(tree)
    assert there_and_back(Root.Config()) == Root.Config()  # what is not set stays so
    assert there_and_back(Root.Config(paths="x")) == Root.Config(paths="x")


TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x85\ufeff"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(
        TEXT, st.sampled_from(["no", "010", "1:30", "1e-4", "2020-01-01", "null", "~", "", " a ", "0x1f", ".inf"])
    ),
    rate=st.floats(min_value=1e-300, allow_nan=False),
    size=st.integers(),
    words=st.lists(TEXT, max_size=3),
)
def test_any_value_goes_there_and_back(text, rate, size, words):
    tree = Root.Config(leaf=Leaf.Config(text=text, rate=rate, size=size), paths=tuple(words), anything=text)
    again = there_and_back(tree)
    assert again == tree
    assert type(again.leaf.rate) is float  # pyright: ignore[reportAttributeAccessIssue]


def test_configured_callables_go_there_and_back():
    result = configure(optimizer, rate=configure(schedule, peak=0.1), b1=0.8)
    data = encode(result, NAMES)
    assert data == {
        "type": "optimizer", "rate": {"type": "schedule", "peak": 0.1, "steps": 10}, "b1": 0.8, "betas": [1, 2],
    }  # fmt: skip
    again = there_and_back(result)
    assert again == result
    assert again.build(rngs=5) == result.build(rngs=5) == ((0.1, 10), 0.8, float, [1, 2], 5)
    with pytest.raises(RequestError, match="plain values"):
        encode(configure(optimizer, dtype=int), NAMES)  # set by someone, so leaving it out would lose it


def decode(text: str, annotation: Any = Node) -> Any:
    document = parse(text, "f.yaml")
    try:
        return DECODER.decode(document.data, annotation)
    except ConfigError as error:
        raise ConfigError(document.locate(p) for p in error.problems) from None


def test_all_problems_of_a_file_with_path_and_line():
    with pytest.raises(ConfigError) as caught:
        decode(
            "type: root\n"
            "leaf:\n"
            "  type: leaf\n"
            "  rate: -1\n"
            "  sizee: 3\n"
            "exact:\n"
            "  type: leaf\n"
            "  dim: 4\n"
            "maybe: {type: leav}\n"
            "leaves:\n"
            "  - {type: leaf, kind: FASTER}\n"
            "  - 7\n"
            "pair: [1]\n"
            "rates: {a: x}\n"
            "needed: true\n"
        )
    results = {p.path: (p.location, p.message) for p in caught.value.problems}
    assert {k: w for k, (w, _) in results.items()} == {
        "leaf.rate": "f.yaml:4",
        "leaf.sizee": "f.yaml:5",
        "exact.dim": "f.yaml:8",
        "maybe.type": "f.yaml:9",
        "leaves.0.kind": "f.yaml:11",
        "leaves.1": "f.yaml:12",
        "pair": "f.yaml:13",
        "rates.a": "f.yaml:14",
        "needed": "f.yaml:15",
    }
    assert "out of range" in results["leaf.rate"][1]
    assert "cannot be set" in results["exact.dim"][1]
    assert "did you mean: leaf" in results["maybe.type"][1]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("rate: 1", "type: is missing"),
        ("type: 5", "type: wrong type"),
        ("type: axlearn_core.config:Scaled", "unknown component"),
        ("5", "a mapping with `type:`"),
        ("[1]", "a mapping with `type:`"),
        ("toy", "a mapping with `type:`, such as {type: toy}"),
        ("type: root\nleaf: null", "f.yaml:2: leaf: wrong type"),
        ("type: root\nexact: {type: scaled}", "f.yaml:2: exact: wrong type"),
        ("type: root\npaths: 3", "f.yaml:2: paths: wrong type"),
        ("type: root\nanything: {type: leav}", "anything.type: unknown component"),
        ("type: leaf\nrate: '1'", "f.yaml:2: rate: wrong type"),
        ("type: leaf\n5: 1", "f.yaml:2: 5: unknown key"),
    ],
)
def test_files_that_do_not_fit(text, match):
    with pytest.raises(ConfigError, match=match):
        decode(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: !!python/object:os.system x", r"f.yaml:1: a: the YAML tag .* is not allowed"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "f.yaml:4: b.c: is a duplicate key"),
        ("a: [1\n", "f.yaml:2: .*not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("? [a]\n: 1", "f.yaml:1: .*plain name"),
        ("&a [*a]", "contains itself"),
        ("a: &x {b: *x}", "contains itself"),
        ("a: \x00", "f.yaml: .*not valid YAML"),
        ("a: !!float x", "f.yaml:1: a: does not match the tag !!float: could not convert"),
    ],
)
def test_text_that_cannot_be_read(text, match):
    with pytest.raises(ConfigError, match=match):
        parse(text, "f.yaml")


def test_scalars_follow_yaml_1_2():
    text = "[1e-4, 1E5, no, yes, 010, 1:30, 0o10, 0x1f, 2020-01-01, ~, null, true, .inf, '1', -5]"
    expected = [1e-4, 1e5, "no", "yes", 10, "1:30", 8, 31, "2020-01-01", None, None, True, float("inf"), "1", -5]
    actual = parse(text).data
    assert actual == expected
    assert [type(v) for v in actual] == [type(v) for v in expected]
    assert parse("").data is None
    assert parse("a: &x {b: 1}\nc: *x").data == {"a": {"b": 1}, "c": {"b": 1}}


def test_edits_in_place():
    tree = Root.Config()
    new = patch(
        tree,
        {
            "leaf": {"rate": 2, "size": {"type": "scaled", "factor": 3}},
            "table.new": {"type": "leaf", "text": "x"},
            "leaves": [{"type": "scaled"}],
            "rates": {"a": 1},
            "maybe": {"type": "leaf"},
        },
        DECODER.decode_value,
    )
    assert new.leaf == Leaf.Config(rate=2.0, size=Scaled(factor=3.0))
    assert new.table["new"] == Leaf.Config(text="x")
    assert (new.leaves, new.rates, new.maybe) == ((Scaled(),), {"a": 1.0}, Leaf.Config())
    assert patch(new, {"leaves.0": {"factor": 2}}, DECODER.decode_value).leaves == (Scaled(factor=2.0),)
    assert patch(new, {"rates.b": 2}, DECODER.decode_value).rates == {"a": 1.0, "b": 2.0}
    assert patch(new, {"pair.1": "z"}, DECODER.decode_value).pair == (1, "z")


@pytest.mark.parametrize(
    ("path", "value", "at"),
    [
        ("leaf", {"ratee": 2}, "leaf.ratee"),
        ("leaf", {"rate": -2}, "leaf.rate"),
        ("leaf", {"dim": 3}, "leaf.dim"),
        ("leaf", {"kind": "X"}, "leaf.kind"),
        ("leaf.rate", "x", "leaf.rate"),
        ("leaves", [{"type": "leaf", "rate": "x"}], "leaves.0.rate"),
        ("table.new", {"text": "x"}, "table.new.type"),
        ("table.new", 3, "table.new"),
        ("rates", {"a": "x"}, "rates.a"),
        ("maybe", {"rate": 1}, "maybe"),
        ("pair", [1, 2], "pair.1"),
        ("needed", 1.5, "needed"),
    ],
)
def test_edits_that_do_not_fit(path, value, at):
    with pytest.raises(ConfigError) as caught:
        patch(Root.Config(), {path: value}, DECODER.decode_value)
    assert [p.path for p in caught.value.problems] == [at]


def test_what_no_file_can_hold():
    with pytest.raises(RequestError, match="plain values and nodes"):
        encode(Root.Config(anything=object()), NAMES)
    with pytest.raises(RequestError, match="has no name"):
        encode(Configurable.Config(), NAMES)
