"""The step in another execution: what parts is named, and the run stays as it is."""

import functools

import numpy as np
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_runtime.shadow import Comparison, read
from axlearn_plugins_runtime.train_options import EVERY, SHADOW
from support import api_runs
from support.api_runs import lines, losses

train = functools.partial(api_runs.train, steps=3, **api_runs.REPLICAS, **{"model.decoder.num_layers": 2})


@pytest.mark.slow
def test_gradients_part_and_the_run_does_not(tmp_path):
    train(tmp_path / "plain")
    train(tmp_path / "shadow", 'shadow:feature="precision:dtype=bfloat16",every_steps=2')
    assert losses(tmp_path / "plain") == losses(tmp_path / "shadow")
    records = read(tmp_path / "shadow")
    assert [line["step"] for line in records] == [1, 3]
    for line in records:
        assert line["loss"] == pytest.approx(losses(tmp_path / "shadow")[line["step"] - 1], rel=1e-6)
        assert 0 < abs(line["shadow_loss"] / line["loss"] - 1) < 0.02
        each = line["gradients"]
        assert len(each["decoder.layer.attention.query.weight"]) == 2, "one of each layer"
        assert all(1e-5 < np.min(v) <= np.max(v) < 0.5 for v in each.values()), each
    logged = [line for line in lines(tmp_path / "shadow") if "shadow_loss" in line]
    assert [line["step"] for line in logged] == [1, 3]
    assert {"shadow_gradients", "shadow_layer/0", "shadow_layer/1"} <= logged[0].keys()
    assert "shadow_gradient/decoder.embedding.weight" in logged[0]


@pytest.mark.slow
def test_what_only_runs_otherwise_parts_by_rounding_alone(tmp_path):
    train(tmp_path, "shadow:feature=remat", steps=1)
    (line,) = read(tmp_path)
    assert max(np.max(v) for v in line["gradients"].values()) < 1e-5


def test_distances_are_relative_by_parameter_and_layer():
    comparison = Comparison(2.0, 2.5, {"a": [3.0, 0.0], "b": 4.0}, {"a": [6.0, 8.0], "b": 0.0})
    scalars = comparison.scalars()
    assert scalars["shadow_gradients"] == pytest.approx(5 / 10)
    assert scalars["shadow_gradient/a"] == pytest.approx(0.3)
    assert scalars["shadow_layer/0"] == pytest.approx(0.5)
    assert scalars["shadow_layer/1"] == 0
    assert comparison.as_json()["gradients"]["a"] == [0.5, 0.0]


@pytest.mark.slow
def test_another_model_is_refused(tmp_path):
    with pytest.raises(RequestError, match="the feature changes the model's parameters"):
        train(tmp_path, 'shadow:feature="moe:num_experts=4"')
    with pytest.raises(RequestError, match="train-loop without a check"):
        train(tmp_path, "shadow:feature=remat", "sdc-check")


def test_the_command_refuses_before_anything_begins(tmp_path):
    words = ["train", "quickstart", "--run-dir", str(tmp_path / "run"), "--shadow"]
    result = CliRunner().invoke(cli, [*words, "precisio:dtype=bfloat16"])
    assert result.exit_code == 2
    assert "precision" in result.output, "the nearest name"
    result = CliRunner().invoke(cli, [*words, "remat", "--every", "x"])
    assert result.exit_code == 2
    assert "--every x and --shadow remat: shadow.every_steps: wrong type" in result.output
    result = CliRunner().invoke(cli, [*words[:-1], "--every", "3"])
    assert result.exit_code == 2
    assert "--every 3: shadow.feature: ShadowFeature needs a value" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [(SHADOW, EVERY), (EVERY, SHADOW)], ids=["shadow-every", "every-shadow"])
def test_the_options_are_the_feature(changes):
    values = {SHADOW: "precision:dtype=bfloat16", EVERY: "7"}
    request = Request.from_arguments("quickstart")
    for option in changes:
        request = option.change(values[option], request)
    feature = 'shadow:feature="precision:dtype=bfloat16",every_steps=7'
    assert resolve(request).config == resolve("quickstart", with_=[feature]).config
    with_feature = Request.from_arguments("quickstart", with_=['shadow:feature="precision:dtype=bfloat16"'])
    assert resolve(EVERY.change("7", with_feature)).config == resolve(request).config
    with pytest.raises(RequestError, match="has two values for 'every_steps'"):
        resolve(EVERY.change("8", request))


def test_the_feature_refuses_before_anything_begins():
    with pytest.raises(RequestError, match="did you mean: precision"):
        resolve("quickstart", with_=['shadow:feature="precisio:dtype=bfloat16"'])


def test_the_command_asks_for_the_feature(tmp_path):
    words = ["train", "quickstart", "--shadow", "precision:dtype=bfloat16", "--every", "7", "--dry-run"]
    result = CliRunner().invoke(cli, [*words, "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "shadow" in next(line for line in result.output.splitlines() if line.startswith("features"))
