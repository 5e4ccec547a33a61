"""Runs are opened with their tokenizer and template; what cannot be served is refused before anything is compiled."""

import attrs
import pytest
import tiny
from flax import nnx

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import build_engine, open_engine
from axlearn_plugins_transformer.embedding import LearnedPositions

SIZES = {
    "runner.max_rows": 2, "runner.max_context": 96, "runner.row_buckets": (), "runner.chunk_buckets": (),
    "runner.max_step_tokens": 16, "runner.chunk": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "small"
    tiny.axlearn(*tiny.arguments(path, steps=6))
    return path


def config(**changes):
    return patch(ServingEngine.Config(), {**SIZES, **changes})


@pytest.mark.slow
def test_a_run_is_served_with_its_tokenizer(run):
    opened = open_engine(f"{run}/", config=config())
    assert (opened.name, opened.template, opened.engine.max_context) == ("small", None, 96)
    assert opened.engine.end_tokens == {opened.tokenizer.eos_id}
    loaded = ax.load(run)
    with ax.serve(str(run), set=SIZES) as engine:
        want = loaded.generate("def f(", max_tokens=20)
        (result,) = engine.generate("def f(", max_tokens=20, temperature=0)
        assert result.text == want
        assert "".join(engine.stream("def f(", max_tokens=20, temperature=0)) == want
        stop = want[3:5]
        (result,) = engine.generate(["def f("], max_tokens=20, temperature=0, stop=stop)
        assert (result.text, result.samples[0].finish) == (want[: want.find(stop)], "stop")
        stream = engine.stream("def f(", max_tokens=20, temperature=0)
        next(stream)
        stream.close()
        assert engine.statistics().used_blocks == 0
        engine.update_weights(run)
        assert engine.generate("def f(", max_tokens=20, temperature=0)[0].text == want
        assert engine.statistics().compilations == 0


@pytest.mark.slow
def test_an_earlier_checkpoint(run):
    with ax.serve(run, step=3, set=SIZES, warm_up=False) as engine:
        want = ax.load(run, step=3).generate("import ", max_tokens=12)
        assert engine.generate("import ", max_tokens=12, temperature=0)[0].text == want


def test_no_model_there(tmp_path):
    with pytest.raises(CheckpointError, match="no run directory"):
        open_engine(tmp_path / "nothing")


def test_without_the_package(monkeypatch):
    monkeypatch.setenv("AXLEARN_PLUGINS", "-functions:serve")
    with pytest.raises(RequestError, match=r"'serve' of axlearn-plugins-serving .* is blocked by AXLEARN_PLUGINS"):
        _ = ax.serve


def test_no_longer_context_than_there_are_positions():
    model = ax.resolve("quickstart", set={"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32}).config.model
    model = patch(model, {"decoder.position": LearnedPositions.Config(max_length=64)})
    built = model.build(rngs=nnx.Rngs(0))
    with pytest.raises(RequestError, match="at most 64, for which the model has positions"):
        build_engine(built, config=config(), warm_up=False)
    default = attrs.evolve(config(), runner=attrs.evolve(config().runner, max_context=2048))
    assert build_engine(built, config=default, warm_up=False).max_context == 64


def test_more_context_than_the_cache_has():
    model = ax.resolve("quickstart", set={"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32}).config.model
    with pytest.raises(RequestError, match="lower max_context"):
        build_engine(model.build(rngs=nnx.Rngs(0)), config=config(max_context=97), warm_up=False)
