"""Tests of the model and the data. Run `pytest` after installing the package."""

import jax.numpy as jnp
import numpy as np

import axlearn_core as ax
from axlearn_plugins_my_captions.data import LENGTH, DrawnSquares, draw
from axlearn_plugins_my_captions.model import IMAGE
from axlearn_testing import InputSuite

SIZES = {"runner.extras": True, "runner.max_context": 32, "runner.chunk": 8, "runner.max_step_tokens": 16}


class TestDrawnSquares(InputSuite):
    config = DrawnSquares.Config(batch_size=8)


def test_a_caption_names_the_place_of_the_bright_pixel():
    batch = next(DrawnSquares.Config(batch_size=4).build(seed=0, process_index=0, process_count=1).train())
    for tokens, image in zip(batch["tokens"], batch["images"], strict=True):
        row, column = divmod(int(image.argmax()), 8)
        text = bytes(tokens[1:-1].tolist()).decode()
        assert f"row {row} column {column}".startswith(text)
    assert batch["tokens"].shape == (4, LENGTH)
    assert (batch["tokens"][:, 0] == IMAGE).all()


def test_a_trained_model_says_where_the_pixel_is(tmp_path):
    run = ax.train("my-captions", run_dir=tmp_path / "run", set={"max_steps": 200})
    assert run.metrics["loss"] < 0.05
    images = jnp.asarray(draw(3, 5, np.random.default_rng(7)))[None]
    with ax.serve(tmp_path / "run", set=SIZES, warm_up=False) as engine:
        (generation,) = engine.generate([[IMAGE]], extras=[{"images": images}], max_tokens=20, temperature=0)
    assert generation.text == "row 3 column 5"
