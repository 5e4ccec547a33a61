"""Runs of code that is not registered, as a notebook trains it."""

import json
import re

import jax.numpy as jnp
import optax
import pytest
from click.testing import CliRunner
from flax import nnx

import axlearn_core as ax
from axlearn_core.checkpoint import LocalStorage
from axlearn_core.cli.main import cli
from axlearn_core.config import configure, patch
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.nn.layer import Layer
from axlearn_core.plugins import code_names
from axlearn_core.plugins.code_names import CodeNames, restore_values
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import read_text, write
from axlearn_core.run.record import short_hash
from axlearn_core.run.stored_config import read_run_config
from support import toy_models

SMALL = {
    "model.decoder.num_layers": 1, "model.decoder.hidden_dim": 16, "model.decoder.layer.attention.num_heads": 2,
    "input.batch_size": 8, "input.sequence_length": 16, "evaluators": {}, "log_every_steps": 1,
}  # fmt: skip


def small():
    """The quickstart with a layer, a norm and an optimizer's setting that no file can name."""

    class Bottleneck(Layer):
        @ax.node
        class Config(Layer.Config["Bottleneck"]):
            input_dim: int = ax.interface()
            rank: int = 4

        def __init__(self, cfg, *, rngs, precision):
            super().__init__(cfg, precision=precision)
            self.down = nnx.Linear(cfg.input_dim, cfg.rank, rngs=rngs)
            self.up = nnx.Linear(cfg.rank, cfg.input_dim, rngs=rngs)

        def __call__(self, x):
            return self.up(self.down(x))

    return {
        **SMALL,
        "model.decoder.layer.feed_forward": Bottleneck.Config(rank=3),
        "model.**.norm": configure(nnx.RMSNorm, "num_features=dim"),
        "learner.optimizer": configure(optax.adam, learning_rate=0.01, mu_dtype=jnp.bfloat16),
    }


@pytest.mark.slow
def test_it_trains_says_so_and_goes_on(tmp_path, capsys):
    settings = small()
    with toy_models.quick_to_compile():
        ax.train("quickstart", set=settings, steps=2, run_dir=tmp_path / "run")
        output = capsys.readouterr().err
        result = ax.train("quickstart", set=settings, steps=3, run_dir=tmp_path / "run")
    assert result.step == 3
    (line,) = [text for text in output.splitlines() if text.startswith("not registered")]
    name = f"{__name__}:small.<locals>.Bottleneck"
    assert re.search(rf"{re.escape(name)}#[0-9a-f]{{8}} at model.decoder.layer.feed_forward", line)
    assert "RMSNorm(num_features=dim) at model.decoder.layer.norm" in line
    assert "<python code> jax.numpy:bfloat16" in line
    assert "cannot be read without this code" in line
    decisions = json.loads((tmp_path / "run/run.lock.json").read_text())["decisions"]
    assert name in next(d["subject"] for d in decisions if d["kind"] == "not registered")
    loaded = ax.load(tmp_path / "run")
    assert loaded.config.learner.optimizer.mu_dtype is jnp.bfloat16
    assert type(loaded.model.decoder.unstacked().layer[0].feed_forward).__name__ == "Bottleneck"


def write_run(run, config, monkeypatch, name):
    """A config file of a run of another process, whose code was called `name`."""
    text = write(config, CodeNames(registry()))
    monkeypatch.setattr(code_names, "_VALUES", {})
    run.mkdir()
    own = re.escape(f"{__name__}:small.<locals>.Bottleneck")
    (run / "config.yaml").write_text(re.sub(rf"{own}#[0-9a-f]{{8}}", name, text))


def test_without_the_code_it_is_refused_by_name(tmp_path, monkeypatch):
    cfg = patch(ax.resolve("quickstart").config, small())
    write_run(tmp_path / "run", cfg, monkeypatch, "__main__:Elsewhere")
    result = CliRunner().invoke(cli, ["generate", str(tmp_path / "run"), "--prompt", "x"])
    assert result.exit_code == 2
    assert (
        "model.decoder.layer.feed_forward.type: __main__:Elsewhere was not registered as a component" in result.output
    )
    assert "axlearn.components" in result.output


def test_values_of_code_are_refused_by_path_in_another_process(tmp_path, monkeypatch):
    cfg = patch(ax.resolve("quickstart").config, {"learner.optimizer": small()["learner.optimizer"]})
    write_run(tmp_path / "run", cfg, monkeypatch, "")
    with pytest.raises(CheckpointError, match=r"learner.optimizer.mu_dtype: is a Python value(.|\n)*bfloat16"):
        read_run_config(LocalStorage(tmp_path / "run"), "run")


def test_there_and_back_in_one_process():
    cfg = patch(ax.resolve("quickstart").config, small())
    names = CodeNames(registry())
    assert restore_values(read_text(write(cfg, names), "f.yaml", names).experiment) == cfg  # type: ignore[arg-type]
    registered = CodeNames(registry())
    write(ax.resolve("quickstart").config, registered)
    assert registered.decisions(cfg) == ()


def with_init(function):
    norm = configure(nnx.RMSNorm, "num_features=dim", scale_init=function)
    return patch(ax.resolve("quickstart").config, {"model.**.norm": norm})


def test_code_that_is_defined_otherwise_is_other_code():
    def scaled(scale):
        return lambda key, shape, dtype: scale * jnp.ones(shape, dtype)

    def text(function):
        return write(with_init(function), CodeNames(registry()))

    assert text(scaled(1)) == text(scaled(1))
    assert text(scaled(1)) != text(scaled(2))
    assert text(lambda key, shape, dtype: jnp.ones(shape, dtype)) != text(
        lambda key, shape, dtype: jnp.zeros(shape, dtype)
    )


@pytest.mark.parametrize("remembered", [True, False], ids=["same process", "another process"])
def test_a_run_does_not_go_on_with_a_layer_that_was_defined_again(tmp_path, monkeypatch, remembered):
    def settings(factor):
        class Scale(Layer):
            @ax.node
            class Config(Layer.Config["Scale"]):
                input_dim: int = ax.interface()

            def __init__(self, cfg, *, rngs, precision):
                super().__init__(cfg, precision=precision)

            def __call__(self, x):
                return factor * x

        return {**SMALL, "model.decoder.layer.feed_forward": Scale.Config()}

    text = write(ax.resolve("quickstart", set=settings(0.5), steps=3).config, CodeNames(registry()))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(text if remembered else re.sub("Scale#[0-9a-f]+", "Scale#01234567", text))
    expected = "feed_forward.type" if remembered else "its definition has changed"
    with pytest.raises(RequestError, match=expected):
        ax.train("quickstart", set=settings(0.25), steps=3, run_dir=tmp_path / "run")


def test_text_that_begins_like_a_language_is_text():
    prompts = patch(ax.resolve("quickstart").config, {"model.decoder.layer.attention.kernel": "python:def f"})
    assert restore_values(prompts) == prompts


def test_a_file_names_no_code_that_was_not_made_a_node():
    with pytest.raises(RequestError, match="os:system was not registered as a component"):
        CodeNames(registry()).component("os:system")


def test_hashes_hold_no_addresses():
    def config():
        init = lambda key, shape, dtype: jnp.ones(shape, dtype)  # noqa: E731
        norm = configure(nnx.RMSNorm, "num_features=dim", scale_init=init)
        return patch(ax.resolve("quickstart").config, {"model.**.norm": norm})

    assert short_hash(config()) == short_hash(config())


def test_the_command_line_still_asks_for_names():
    with pytest.raises(RequestError, match="is not registered as a component"):
        ax.resolve("quickstart", set={"model.**.norm": configure(nnx.RMSNorm, "num_features=dim")}).to_yaml()
