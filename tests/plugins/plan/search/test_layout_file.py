"""Layout files apply to any experiment with the same model and machine."""

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan.search.layout_file import LayoutFile, model_hash, read_layout

SMALL = {"model.decoder.num_layers": 1}


@pytest.fixture
def layout(tmp_path):
    config = resolve("quickstart", set=SMALL, target="cpu-8").config

    def write(**changes):
        values = {
            "experiment": "quickstart",
            "model": model_hash(config),
            "target": "cpu-8",
            "features": ("gradient-accumulation:steps=2",),
            "settings": {"mesh.shape": {"fsdp": 4, "tensor": 2}},
        }
        path = tmp_path / "layout.yaml"
        LayoutFile(**{**values, **changes}).write(path)
        return path

    return write


def test_it_is_read_as_it_was_written(layout):
    actual = read_layout(layout())
    assert actual.features == ("gradient-accumulation:steps=2",)
    assert actual.settings == {"mesh.shape": {"fsdp": 4, "tensor": 2}}


def test_it_brings_its_machine_and_settings(layout):
    resolved = resolve("quickstart", set=SMALL, layout=layout())
    assert resolved.machine.name == "cpu-8"
    assert dict(resolved.config.mesh.shape) == {"fsdp": 4, "tensor": 2}
    assert resolved.config.learner.accumulate_steps == 2


def test_what_the_model_does_not_depend_on_may_differ(layout):
    resolved = resolve("quickstart", set={**SMALL, "seed": 7, "max_steps": 3}, layout=layout())
    assert resolved.config.seed == 7


@pytest.mark.parametrize("change", [{"model.decoder.num_layers": 2}, {"input.batch_size": 16}])
def test_another_model_or_batch_is_an_error(layout, change):
    with pytest.raises(RequestError, match="layout for a different model or different batches"):
        resolve("quickstart", set={**SMALL, **change}, layout=layout())


def test_another_machine_is_an_error(layout):
    with pytest.raises(RequestError, match="layout for a different machine"):
        resolve("quickstart", set=SMALL, target="cpu-4", layout=layout())


def test_mathematics_is_not_a_layout(layout):
    path = layout(settings={"learner.optimizer.learning_rate.peak": 0.5})
    with pytest.raises(RequestError, match="changes the computation"):
        resolve("quickstart", set=SMALL, layout=path)
    varied = layout(settings={"learner.optimizer.learning_rate.peak": 0.5}, varies=("learner.optimizer",))
    assert resolve("quickstart", set=SMALL, layout=varied).config.learner.optimizer.learning_rate.peak == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiment: quickstart\n", "is not a layout file"),
        ("layout: 1\n", "is missing"),
        ("layout: 2\nmodel: a\ntarget: cpu\n", "another version of this file format"),
        ("layout: 1\nmodel: a\ntarget: cpu\nfeatures: []\n", "unknown key in a layout file"),
        ("layout: 1\nmodel: a\ntarget: [cpu]\n", "wrong type"),
    ],
)
def test_what_is_no_layout_file_is_an_error(tmp_path, text, message):
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_layout(path)


def test_a_missing_file_is_an_error_of_the_request(tmp_path):
    result = CliRunner().invoke(cli, ["config", "show", "quickstart", "--layout", str(tmp_path / "no.yaml")])
    assert result.exit_code == 2
    assert "cannot read the layout" in result.stderr
