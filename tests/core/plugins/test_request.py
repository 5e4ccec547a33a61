"""Requests as users write them on the command line and in run files."""

import pytest

from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request, parse_feature, parse_setting, read, read_text


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("rope", "rope", {}),
        ("rope:", "rope", {}),
        ("moe:num_experts=8,top_k=2", "moe", {"num_experts": 8, "top_k": 2}),
        ("rope:theta=5e5", "rope", {"theta": 5e5}),
        ("rope:theta=1e-4", "rope", {"theta": 1e-4}),
        ("f:names=[a, b],on=true", "f", {"names": ["a", "b"], "on": True}),
        ("f:map={a: 1, b: [2, 3]},x=1", "f", {"map": {"a": 1, "b": [2, 3]}, "x": 1}),
        ("f:text='a, b',x=1", "f", {"text": "a, b", "x": 1}),
        ('f:text="a, \\", b",x=1', "f", {"text": 'a, ", b', "x": 1}),
        ("f:text=it's,x=1", "f", {"text": "it's", "x": 1}),
        ("lora:target=model.**.attention.*,rank=4", "lora", {"target": "model.**.attention.*", "rank": 4}),
        ("lora:target=**.attention", "lora", {"target": "**.attention"}),
        ("f:a=no,b=010,c=1:30", "f", {"a": "no", "b": 10, "c": "1:30"}),
        ("f:a=x=y", "f", {"a": "x=y"}),
        ("f:a=", "f", {"a": None}),
    ],
)
def test_features(text, name, options):
    use = parse_feature(text)
    assert (use.name, dict(use.options)) == (name, options)
    assert [type(v) for v in use.options.values()] == [type(v) for v in options.values()]
    assert use.location == f"--with {text}"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("moe:8", "'8' is not an option"),
        ("moe:=8", "'=8' is not an option"),
        ("moe:a=1,a=2", "set twice"),
        (":a=1", "the name is missing"),
        ("", "the name is missing"),
        ("f:a=[1", "--with f:a=\\[1: .*not valid YAML"),
        ("f:a=!!python/name:os.system", "tag"),
    ],
)
def test_features_that_cannot_be_read(text, match):
    with pytest.raises(RequestError, match=match):
        parse_feature(text)


def test_settings():
    assert (parse_setting("a.b=[1, 2]").path, parse_setting("a.b=[1, 2]").value) == ("a.b", [1, 2])
    assert parse_setting("a={type: x, y: 2}").value == {"type": "x", "y": 2}
    assert parse_setting("a=b=c").value == "b=c"
    assert parse_setting("a=null").value is None
    for text in ("a.b", "=3", ""):
        with pytest.raises(RequestError, match="expected PATH=VALUE"):
            parse_setting(text)


def test_one_string_where_a_list_is_meant():
    with pytest.raises(RequestError, match="list"):
        Request.from_arguments("x", with_="rope")
    with pytest.raises(RequestError, match="list"):
        Request.from_arguments("x", set="a=1")


RUN = """\
experiment: toy
features:
  - moe: {num_experts: 8}
  - rope
target: chip-8
without: [wide]
set:
  max_steps: 7
  model.*.num_heads: 2
"""


def test_a_run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    request = read(path, registry())
    assert request.experiment == "toy"
    assert [(u.name, dict(u.options), u.location) for u in request.features] == [
        ("moe", {"num_experts": 8}, f"{path}:3"),
        ("rope", {}, f"{path}:4"),
    ]
    assert [(s.path, s.value, s.location) for s in request.file_settings] == [
        ("max_steps", 7, f"{path}:8"),
        ("model.*.num_heads", 2, f"{path}:9"),
    ]
    assert (request.target, request.without) == ("chip-8", ("wide",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("experiment: toy\nfeature: [a]\n", ["r.yaml:2: feature: unknown key", "did you mean: features?"]),
        ("experiment: toy\nmax_steps: 5\n", ["r.yaml:2: max_steps", "under `set:`"]),
        ("experiment: 5\nset: [a]\n", ["r.yaml:1: experiment: wrong type", "r.yaml:2: set: wrong type", "a mapping"]),
        ("features: []\n", ["the experiment is missing"]),
        ("experiment: toy\nfeatures:\n  - a\n  - {b: 1, c: 2}\n", ["r.yaml:4: features.1: is not a feature"]),
        ("experiment: toy\nfeatures:\n  - a: 3\n", ["r.yaml:3: features.0: is not a feature"]),
        ("experiment: toy\nwithout: [3]\n", ["r.yaml:2: without.0"]),
        ("- a\n", ["r.yaml: (root): is not a run file"]),
        ("", ["is not a run file"]),
        ("a: [1\n", ["not valid YAML"]),
        ("a: 1\na: 2\n", ["r.yaml:2: a: is a duplicate key"]),
        ("resolved: yes\ntype: x\n", ["r.yaml:1: resolved: must be true", "'yes' (str)"]),
        ("resolved: true\ntype: no-such\n", ["r.yaml:2: type", "unknown component 'no-such'"]),
        ("resolved: true\nmax_steps: 5\n", ["type: is missing"]),
    ],
)
def test_run_files_that_are_wrong(text, expected):
    with pytest.raises(ConfigError) as caught:
        read_text(text, "r.yaml", registry())
    for part in expected:
        assert part in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "run.yaml").write_text("experiment: x")
    with pytest.raises(RequestError, match=r"cannot read .*rum.yaml: No such file[\s\S]*did you mean: .*run.yaml"):
        read(tmp_path / "rum.yaml", registry())
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(RequestError, match="not a text file"):
        read(tmp_path / "binary.yaml", registry())
    with pytest.raises(RequestError, match="cannot read"):
        read(tmp_path / "no" / "folder.yaml", registry())
    with pytest.raises(RequestError, match="cannot read"):
        read(tmp_path, registry())
