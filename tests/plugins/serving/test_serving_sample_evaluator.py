"""The sample evaluator on the serving engine, inside a training run."""

import json
from types import SimpleNamespace

import pytest

import axlearn_core as ax
from axlearn_core.errors import ConfigError
from axlearn_plugins_transformer.text import sampling

SETTINGS = {
    "model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "input.sequence_length": 32, "input.batch_size": 8,
}  # fmt: skip
SAMPLE = {"type": "sample-evaluator", "prompt": "def ", "max_tokens": 8, "temperature": 0.0, "every_steps": 2}


def texts(directory):
    lines = (directory / "samples.jsonl").read_text().splitlines()
    return [(line["step"], line["name"], line["text"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_the_engine_writes_what_the_model_writes(tmp_path):
    """Greedy samples after steps 2 and 4 use the weights of those steps."""
    evaluators = {"model": SAMPLE, "engine": {**SAMPLE, "engine": True, "count": 2}}
    ax.train("quickstart", run_dir=tmp_path / "run", steps=4, set={**SETTINGS, "evaluators": evaluators})
    written = texts(tmp_path / "run")
    for step in (2, 4):
        [expected] = [text for at, name, text in written if (at, name) == (step, "model")]
        assert [text for at, name, text in written if (at, name) == (step, "engine")] == [expected] * 2


@pytest.mark.slow
def test_samples_draw_with_seeds_of_their_own(tmp_path):
    evaluators = {"sample": {**SAMPLE, "engine": True, "count": 3, "temperature": 1.0, "every_steps": 0}}
    for name in ("a", "b"):
        ax.train("quickstart", run_dir=tmp_path / name, steps=1, set={**SETTINGS, "evaluators": evaluators})
    first, second = (texts(tmp_path / name) for name in ("a", "b"))
    assert first == second
    assert len({text for *_, text in first}) == 3


def test_without_the_plugin_the_config_is_refused(monkeypatch):
    class Empty:
        claims = {"functions": {}}  # noqa: RUF012

    monkeypatch.setattr(sampling, "registry", lambda: Empty)
    with pytest.raises(ConfigError, match=r"axlearn-plugins-serving, which is not installed[\s\S]*fix: install it"):
        sampling.SampleEvaluator.Config(engine=True).build(name="sample")
    sampling.SampleEvaluator.Config().build(name="sample")


def test_each_sample_has_its_own_seed(monkeypatch):
    seeds = []
    monkeypatch.setattr(sampling, "continue_text", lambda *_, seed, **options: seeds.append(seed) or ["text"])
    evaluator = sampling.SampleEvaluator(sampling.SampleEvaluator.Config(count=3), name="samples")
    session = SimpleNamespace(model=lambda: None, seed=7, program=None)
    assert list(evaluator._write(session, None)) == ["text"] * 3
    assert seeds == [7, 8, 9]
