"""Settings on the command line and in files: their problems and sources, and the nodes that they replace."""

import pytest

from axlearn_core.errors import ConfigError
from axlearn_core.plugins.resolve import resolve

RATE = "learner.optimizer.learning_rate"

pytestmark = pytest.mark.usefixtures("toy")


def replaced(resolved):
    return [(d.subject, d.reason) for d in resolved.decisions if d.kind == "replaced"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model.num_layer=4",
            ["--set model.num_layer=4: model.num_layer: no 'num_layer'", "did you mean: model.num_layers"],
        ),
        ("**.nothing=4", ["--set **.nothing=4", "matches nothing"]),
        ("model.num_layers=four", ["--set model.num_layers=four: model.num_layers: wrong type", "'four' (str)", "int"]),
        ("model.num_layers=true", ["wrong type", "True (bool)"]),
        ("model.attention.num_heads=0", ["--set model.attention.num_heads=0", "out of range", "at least 1"]),
        ("model.attention.dim=4", ["passed by the parent"]),
        ("model.attention={type: toy-atention}", ["unknown component 'toy-atention'", "toy-attention"]),
        ("model.attention={num_head: 3}", ["model.attention.num_head: unknown key", "num_heads"]),
    ],
)
def test_settings_that_do_not_fit(text, expected):
    with pytest.raises(ConfigError) as caught:
        resolve("toy", set=[text])
    for part in expected:
        assert part in str(caught.value)


def test_all_problems_at_once_with_their_lines(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("experiment: toy\nset:\n  max_stepz: 4\n\n  model.*.num_heads: x\n")
    with pytest.raises(ConfigError) as caught:
        resolve(file)
    assert f"{file}:3: max_stepz" in str(caught.value)
    assert f"{file}:5: model.attention.num_heads: wrong type" in str(caught.value)


def test_one_path_set_to_two_values():
    with pytest.raises(
        ConfigError, match=r"max_steps: is set to two different values[\s\S]*--set max_steps=3[\s\S]*--steps 4"
    ):
        resolve("toy", set=["max_steps=3"], steps=4)
    assert resolve("toy", set=["max_steps=4"], steps=4).config.max_steps == 4


def test_a_setting_that_replaces_a_component_is_named():
    resolved = resolve("quickstart", set=[f"{RATE}=0.001"])
    assert replaced(resolved) == [(
        RATE,
        "wsd-schedule(peak=0.012, warmup_steps=20, decay_steps=0.6, end_ratio=0.0) -> 0.001, "
        f"by --set {RATE}=0.001; to change one field: --set {RATE}.peak=0.001",
    )]  # fmt: skip
    ((path, _),) = replaced(resolve("quickstart", set=["**.optimizer.learning_rate=0.001"]))
    assert path == RATE
    changed = resolve("quickstart", set=[f"{RATE}.peak=0.001"])
    assert replaced(changed) == []
    assert changed.config.learner.optimizer.learning_rate.peak == 0.001


@pytest.mark.parametrize(
    "setting",
    [
        "learner.optimizer={type: adamw, learning_rate: 0.001}",  # names another component
        "model.decoder.layer.attention.position=null",  # removes one
        "evaluators={}",
        "max_steps=3",
    ],
)
def test_a_setting_that_says_what_it_does_needs_no_note(setting):
    assert replaced(resolve("quickstart", set=[setting])) == []


def test_a_value_inside_a_named_component_needs_no_note():
    optimizer = "learner.optimizer={type: adamw, learning_rate: {type: cosine-schedule}}"
    assert replaced(resolve("quickstart", set=[optimizer, f"{RATE}=0.1"])) == []


def test_the_same_number_again_replaces_nothing(tmp_path):
    (tmp_path / "file.yaml").write_text(f"experiment: quickstart\nset: {{{RATE}: 0.001}}\n")
    resolved = resolve(tmp_path / "file.yaml", set=[f"{RATE}=0.002"])
    ((_, reason),) = replaced(resolved)
    assert "file.yaml:2" in reason
