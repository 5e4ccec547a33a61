"""Runs open with their tokenizer and template; unsupported models fail before compilation."""

import json
import shutil

import attrs
import pytest
from click.testing import CliRunner
from flax import nnx

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.config import patch
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import build_engine, fit_config, model_name, open_engine
from axlearn_plugins_transformer.embedding import LearnedPositions
from axlearn_plugins_transformer.text import ByteTokenizer
from axlearn_plugins_transformer.text.processor import TextProcessor
from support import cli_runs
from support.paths import HF_FIXTURES

SIZES = {
    "runner.max_rows": 2, "runner.max_context": 96, "runner.row_buckets": (), "runner.chunk_buckets": (),
    "runner.max_step_tokens": 16, "runner.chunk": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "small"
    cli_runs.axlearn(*cli_runs.arguments(path, steps=6))
    return path


def config(**changes):
    return patch(ServingEngine.Config(), {**SIZES, **changes})


@pytest.mark.parametrize(("setting", "pooling"), [(None, "mean"), ("last", "last"), ("off", "off")])
def test_the_pooling_of_the_model_is_the_default(setting, pooling):
    text = TextProcessor.Config(pooling="mean").build(tokenizer=ByteTokenizer.Config().build())
    fitted = config(**{"runner.pooling": setting})
    for _ in range(2):
        fitted = fit_config(fitted, None, text)
    assert fitted.runner.pooling == pooling
    assert bool(fitted.runner.embed_buckets) == (setting != "off")


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
def test_generate_writes_by_the_engine_or_without_it(run, monkeypatch):
    opened = []
    monkeypatch.setattr(ax, "serve", lambda *args, real=ax.serve, **options: opened.append(1) or real(*args, **options))
    words = ["generate", str(run), "--prompt", "def f(", "--max-tokens", "20"]
    served = CliRunner().invoke(cli, words)
    assert served.exit_code == 0, served.output
    assert served.stdout == "def f(" + ax.load(run).generate("def f(", max_tokens=20) + "\n"
    drawn = [CliRunner().invoke(cli, [*words, "--temperature", "1", "--seed", "3"]).stdout for _ in range(2)]
    assert drawn[0] == drawn[1] != served.stdout
    assert len(opened) == 3
    monkeypatch.setenv("AXLEARN_PLUGINS", "-functions:serve")
    alone = CliRunner().invoke(cli, words)
    assert alone.stdout == served.stdout
    assert len(opened) == 3


@pytest.mark.slow
def test_an_earlier_checkpoint(run):
    with ax.serve(run, step=3, set=SIZES, warm_up=False) as engine:
        want = ax.load(run, step=3).generate("import ", max_tokens=12)
        assert engine.generate("import ", max_tokens=12, temperature=0)[0].text == want


def test_no_model_there(tmp_path):
    with pytest.raises(CheckpointError, match="not a run directory"):
        open_engine(tmp_path / "nothing")


def test_without_the_package(monkeypatch):
    monkeypatch.setenv("AXLEARN_PLUGINS", "-functions:serve")
    with pytest.raises(RequestError, match=r"'serve' of axlearn-plugins-serving .* is blocked by AXLEARN_PLUGINS"):
        _ = ax.serve


@pytest.mark.slow
def test_no_longer_context_than_there_are_positions():
    model = ax.resolve("quickstart", set={"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32}).config.model
    model = patch(model, {"decoder.position": LearnedPositions.Config(max_length=64)})
    built = model.build(rngs=nnx.Rngs(0))
    with pytest.raises(RequestError, match="at most 64, the number of positions of the model"):
        build_engine(built, config=config(), warm_up=False)
    default = attrs.evolve(config(), runner=attrs.evolve(config().runner, max_context=2048))
    assert build_engine(built, config=default, warm_up=False).max_context == 64


def test_more_context_than_the_cache_has():
    model = ax.resolve("quickstart", set={"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32}).config.model
    with pytest.raises(RequestError, match="lower max_context"):
        build_engine(model.build(rngs=nnx.Rngs(0)), config=config(max_context=97), warm_up=False)


def test_every_end_token_of_a_model_directory_ends_outputs(tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(HF_FIXTURES / "llama2", directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 11, -1, "x", 10**9]}))
    data = json.loads((directory / "config.json").read_text())
    engine = open_engine(directory, config=config(), warm_up=False).engine
    assert engine.end_tokens == {7, 11, data["eos_token_id"]}


def test_a_model_directory_that_names_no_end_token_says_so(tmp_path, capfd):
    directory = tmp_path / "model"
    shutil.copytree(HF_FIXTURES / "llama2", directory)
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({k: v for k, v in data.items() if k != "eos_token_id"}))
    (directory / "generation_config.json").unlink(missing_ok=True)
    opened = open_engine(directory, config=config(), warm_up=False)
    assert opened.engine.end_tokens == {opened.tokenizer.eos_id}
    error = capfd.readouterr().err
    assert error.count("names the token that ends a text") == 1
    assert repr(opened.tokenizer.eos_token) in error


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("org/name", "org/name"),
        ("org/name@v1", "org/name"),
        ("folder/run", "run"),
        ("folder/run/", "run"),
        ("gs://bucket/runs/mine?base=gs://bucket/base", "mine"),
        (".", "here"),
        ("folder/..", "here"),
    ],
)
def test_the_default_name_of_a_model(uri, name, tmp_path, monkeypatch):
    (tmp_path / "here/folder/run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert model_name(uri) == name
