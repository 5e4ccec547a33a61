"""Nodes are values: frozen, exact, hashable, picklable; build gives each child what it declares."""

import enum
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import attrs
import pytest

from axlearn_core.config import REQUIRED, Configurable, Node, check, interface, node, setting
from axlearn_core.errors import ConfigError


class Norm(Protocol):
    dim: int


class Rms(Configurable):
    @node
    class Config(Configurable.Config["Rms"]):
        dim: int = interface()
        eps: float = setting(default=1e-6, gt=0, lt=1)

    def __init__(self, cfg: Config, *, rngs: int):
        self.dim, self.eps, self.rngs = cfg.dim, cfg.eps, rngs


class Plain(Rms):
    """A subclass without a Config of its own."""


class Kind(enum.Enum):
    FAST = 1
    SLOW = 2


class Block(Configurable):
    @node
    class Config(Configurable.Config["Block"]):
        width: int = REQUIRED
        norm: Node[Norm] = Rms.Config()
        rms: Rms.Config = Rms.Config()
        maybe: Node[Norm] | None = None
        size: int | Node[int] = 4
        names: tuple[str, ...] = ()
        pair: tuple[int, float] = (1, 2.0)
        table: Mapping[str, float] = {}
        mode: Literal["scan", "unroll"] = "scan"
        kind: Kind = Kind.FAST
        ratio: float = 1.0
        flag: bool = False
        anything: Any = None

    def __init__(self, cfg: Config, *, rngs: int, scale: float = 1.0):
        self.cfg, self.scale = cfg, scale
        self.norm = cfg.norm.build(dim=cfg.width, rngs=rngs, other="dropped")


def test_nodes_are_frozen_hashable_values():
    a, b = Block.Config(width=3), Block.Config(width=3)
    assert a == b
    assert hash(a) == hash(b)
    assert a != Block.Config(width=4)
    assert Rms.Config() != Plain.Config()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        a.width = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises((AttributeError, attrs.exceptions.FrozenInstanceError)):
        a.typo = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        Block.Config(widht=4)  # pyright: ignore[reportCallIssue]


def test_containers_become_immutable_and_ints_become_floats():
    cfg = Block.Config(names=["a"], pair=[1, 2], table={"x": 1}, ratio=2, anything=[{"k": [1]}])  # pyright: ignore[reportArgumentType]
    assert cfg.names == ("a",)
    assert cfg.pair == (1, 2.0)
    assert [type(v) for v in (cfg.pair[1], cfg.table["x"], cfg.ratio)] == [float, float, float]
    assert hash(cfg) == hash(
        Block.Config(names=("a",), pair=(1, 2.0), table={"x": 1.0}, ratio=2.0, anything=({"k": (1,)},))
    )
    with pytest.raises(TypeError):
        cfg.table["y"] = 1  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    ("field", "value", "path", "expected"),
    [
        ("width", True, "width", "int"),
        ("width", 2.0, "width", "int"),
        ("width", "3", "width", "int"),
        ("width", None, "width", "int"),
        ("ratio", True, "ratio", "float"),
        ("ratio", float("nan"), "ratio", "float"),
        ("ratio", 10**400, "ratio", "float"),
        ("flag", 1, "flag", "bool"),
        ("flag", "false", "flag", "bool"),
        ("norm", Rms, "norm", "Node[Norm]"),
        ("norm", None, "norm", "Node[Norm]"),
        ("maybe", 3, "maybe", "Node[Norm] or null"),
        ("rms", Block.Config(), "rms", "Config"),
        ("size", 2.5, "size", "int or Node[int]"),
        ("names", "ab", "names", "tuple[str, ...]"),
        ("names", ("a", 3), "names.1", "str"),
        ("pair", (1,), "pair", "2 items"),
        ("pair", (1, "x"), "pair.1", "float"),
        ("table", {"a": "x"}, "table.a", "float"),
        ("table", [1], "table", "Mapping"),
        ("mode", "scam", "mode", "one of 'scan', 'unroll'"),
        ("kind", "FASTER", "kind", "one of FAST, SLOW"),
    ],
)
def test_wrong_types(field, value, path, expected):
    with pytest.raises(ConfigError) as caught:
        Block.Config(**{field: value})
    (problem,) = caught.value.problems
    assert problem.path == path
    assert expected in (problem.expected or "")
    assert problem.got


def test_all_problems_of_a_node_at_once():
    with pytest.raises(ConfigError) as caught:
        Block.Config(width="a", ratio="b", names=(1,))  # pyright: ignore[reportArgumentType]
    assert [p.path for p in caught.value.problems] == ["width", "names.0", "ratio"]


def test_bounds():
    for eps in (0.0, 1.0, -1):
        with pytest.raises(ConfigError, match="more than 0 and less than 1"):
            Rms.Config(eps=eps)
    with pytest.raises(ConfigError, match="out of range"):
        attrs.evolve(Rms.Config(), eps=2.0)


def test_enum_members_by_name():
    assert Block.Config(kind="SLOW").kind is Kind.SLOW  # pyright: ignore[reportArgumentType]


def test_build_gives_each_part_what_it_declares():
    block = Block.Config(width=8).build(rngs=7, unknown=1)
    assert (block.norm.dim, block.norm.rngs, block.scale) == (8, 7, 1.0)
    assert Block.Config(width=8).build(rngs=7, scale=2.0).scale == 2.0


def test_build_refuses_what_is_not_set():
    with pytest.raises(ConfigError, match=r"width: .*needs a value[\s\S]*set it"):
        Block.Config().build(rngs=1)
    with pytest.raises(ConfigError, match=r"dim: .*needs a value[\s\S]*the parent must offer it"):
        Rms.Config().build(rngs=1)


def test_a_subclass_without_a_config_gets_its_own():
    assert Plain.Config is not Rms.Config
    assert issubclass(Plain.Config, Rms.Config)
    assert type(Plain.Config().build(dim=1, rngs=1)) is Plain
    assert type(Rms.Config().build(dim=1, rngs=1)) is Rms


def test_classes_that_are_declared_wrongly():
    with pytest.raises(TypeError, match="lacks @node"):

        class Unmarked(Configurable):
            class Config(Configurable.Config["Unmarked"]):
                x: int = 1

    with pytest.raises(TypeError, match="does not derive from Node"):

        class Foreign(Configurable):
            @attrs.frozen
            class Config:
                x: int = 1

    with pytest.raises(TypeError, match="has no default"):

        @node
        class NoDefault(Node[Any]):
            x: int = attrs.field()

    with pytest.raises(TypeError, match="the field name 'type' is reserved"):

        @node
        class Reserved(Node[Any]):
            type: str = ""


def test_an_annotation_that_cannot_be_resolved():
    @node
    class Local(Node[Any]):
        x: "Nowhere" = 1  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    with pytest.raises(TypeError, match="cannot be resolved"):
        Local()


def test_required_and_hashes_survive_pickling_into_another_process():
    cfg = Block.Config(names=("a",), table={"x": 1.0})
    hash(cfg)
    again = pickle.loads(pickle.dumps(cfg))
    assert again == cfg
    assert again.width is REQUIRED
    from axlearn_core.config.sizes import Scaled

    result = Scaled(factor=2.0)
    hash(result)
    code = (
        "import pickle, sys; from axlearn_core.config import Scaled\n"
        f"cfg = pickle.loads({pickle.dumps(result)!r})\n"
        "assert cfg == Scaled(factor=2.0) and hash(cfg) == hash(Scaled(factor=2.0))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_reports_missing_and_invalid_values_together():
    @node
    class Even(Node[Any]):
        value: int = 3
        below: tuple[Node[Any], ...] = ()

        def validate(self):
            from axlearn_core.errors import Problem

            if self.value % 2:
                yield Problem(path="value", message="is odd")

    tree = Even(below=(Block.Config(), Even(value=2), Even()))
    with pytest.raises(ConfigError) as caught:
        check(tree)
    assert {p.path for p in caught.value.problems} == {"value", "below.0.width", "below.2.value"}
    assert check(Even(value=2)) == Even(value=2)
