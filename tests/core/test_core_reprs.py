"""What `print` shows of the objects that `ax` returns: one short line."""

from pathlib import Path

import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.run import Run
from axlearn_core.train import LoadedModel, Result

FIXTURE = Path(__file__).parents[1] / "fixtures/run_of_llama/run"


@pytest.fixture(scope="module")
def resolved():
    small = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "model.vocab_size": 64}
    return ax.resolve("quickstart", with_=["rope:theta=500000"], set=small, target="cpu-1")


@pytest.fixture(scope="module")
def program(resolved):
    import jax

    return ax.compose(resolved.config, jax.devices()[:1])


def test_a_request(resolved):
    assert repr(resolved) == "Resolved(quickstart, with rope, with scan, for cpu-1)"
    assert resolved._repr_html_() == resolved.config._repr_html_()


def test_a_program_and_its_model(program):
    count = program.functional.num_parameters
    assert repr(program) == f"Program(quickstart, {count:,} parameters on 1 cpu device)"
    assert repr(program.functional).startswith(f"Functional({count:,} parameters in ")
    model = program.functional.describe()
    assert repr(model) == str(model) == f"CausalLM(decoder: Decoder, {count:,} parameters)"
    assert repr(model.decoder.norm) == "RMSNorm(32 parameters)"


def test_a_layer_with_arrays(resolved):
    model = resolved.config.model.build(rngs=nnx.Rngs(0))
    assert str(model).startswith("CausalLM(decoder: Decoder, ")
    assert "Param" in repr(nnx.List([model.decoder.norm]))  # nnx still shows the parts of a layer


def test_a_loaded_model_and_its_run(program, resolved):
    loaded = LoadedModel(resolved.config, program, None, None, 1200)
    assert (
        repr(loaded)
        == f"LoadedModel(quickstart, step 1,200, {program.functional.num_parameters:,} parameters, no tokenizer)"
    )
    assert (repr(Run(FIXTURE)), str(Run(FIXTURE))) == (f"Run('{FIXTURE}')", str(FIXTURE))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            Result(Path("runs/a"), 3, {"loss": 1.23456, "eval_loss": 2.0}),
            "Result(runs/a, step 3, loss 1.235, eval_loss 2)",
        ),
        (Result(Path("runs/a"), 3000, {}, 15, "s3://b/a"), "Result(s3://b/a, step 3,000, stopped by signal 15)"),
        (Result(Path("r"), 1, {str(i): 1.0 for i in range(9)}), "Result(r, step 1, 0 1, 1 1, 2 1, 3 1)"),
    ],
)
def test_a_result(result, text):
    assert repr(result) == text


def test_a_whole_config(resolved):
    text = ax.render(resolved.config)
    assert "eps: 1.0e-05" in text or "eps: 1e-05" in text
    assert text.startswith("resolved: true\n")
    assert len(text) > 2 * len(repr(resolved.config))


def test_a_whole_config_with_code_that_is_not_registered(resolved):
    class Tanh(ax.Layer):
        pass

    text = ax.render(ax.patch(resolved.config, {"model.decoder.norm": Tanh.Config()}))
    assert "Tanh#" in text
