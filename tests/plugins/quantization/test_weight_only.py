import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.checkpoint import manifest
from axlearn_core.compose import Functional
from axlearn_core.config import find
from axlearn_core.errors import CheckpointError, ConfigError, RequestError
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.linear import Linear
from axlearn_plugins_moe.feature import MoE
from axlearn_plugins_quantization.feature import weight_only_config
from axlearn_plugins_quantization.library import dequantize_weight, load, quantize_weight
from axlearn_plugins_quantization.store import quantize_params, quantize_run, size
from axlearn_plugins_quantization.weight_only import NoLearner, WeightOnlyLinear

QUICK = {"xla_backend_optimization_level": 0}


def build(cfg):
    axes = ("embed", "heads", "head_dim")
    return cfg.build(input_dims=(128,), output_dims=(4, 32), axes=axes, rngs=nnx.Rngs(0), precision=Precision())


@pytest.mark.slow_cases("int8-None-0.009")
@pytest.mark.parametrize(
    ("storage", "tile", "bound"), [("int8", None, 0.009), ("int4", None, 0.14), ("int4", 32, 0.11)]
)
def test_values_are_close(storage, tile, bound):
    """int4 has 7.5 steps on each side: an error of 2.7 / (15 sqrt(3)) = 10%, and less if fewer values share a scale."""
    exact, close = build(Linear.Config()), build(WeightOnlyLinear.Config(storage=storage, tile_size=tile))
    assert close.weight[...].dtype == jnp.dtype(storage)
    assert close.weight_scale[...].shape == (1 if tile is None else 128 // tile, 4, 32)
    x = jax.random.normal(jax.random.key(1), (3, 7, 128))
    y, z = exact(x), close(x)
    assert 1e-4 < float(jnp.linalg.norm(y - z) / jnp.linalg.norm(y)) < bound
    assert close(x.astype(jnp.bfloat16)).dtype == jnp.float32  # the compute dtype
    assert close.weight_scale.get_metadata()["out_sharding"] == (None, "heads", "head_dim")


def grid(largest, tile, rng):
    """Return weights [128, 6] that are integers up to `largest`, times a power of two for each output and tile of inputs."""
    integers = rng.integers(-largest, largest + 1, (128 // tile, tile, 6))
    integers[:, 0] = largest
    return (integers * 2.0 ** rng.integers(-12, 9, (128 // tile, 1, 6))).reshape(128, 6).astype(np.float32)


@pytest.mark.parametrize(("storage", "largest"), [("int8", 127), ("int8", 12), ("int8", 5), ("int4", 7), ("int4", 3)])
@pytest.mark.parametrize("tile", [32, 128])
def test_integers_times_a_power_of_two_stay_exact(storage, largest, tile):
    weight = grid(largest, tile, np.random.default_rng(largest))
    weight[:tile, 1] = 0
    values, scales = quantize_weight(jnp.asarray(weight), 1, storage, tile)
    assert (values.dtype, scales.shape) == (jnp.dtype(storage), (128 // tile, 6))
    np.testing.assert_array_equal(dequantize_weight(values, scales, jnp.float32), weight)


def test_tiles_that_are_not_exact_are_rounded_as_before():
    rng = np.random.default_rng(0)
    weight = np.concatenate([grid(5, 32, rng)[:64], rng.normal(size=(64, 6)).astype(np.float32)])
    values, scales = quantize_weight(jnp.asarray(weight), 1, "int8", 32)
    package, *_ = load()
    rounded = package.quantize(
        jnp.asarray(weight), "int8", channelwise_axes=(1,), tiled_axes={0: 32}, scale_dtype="float32"
    )
    np.testing.assert_array_equal(dequantize_weight(values, scales, jnp.float32)[:64], weight[:64])
    np.testing.assert_array_equal(values[64:], rounded.qvalue[64:])
    np.testing.assert_array_equal(scales[2:], rounded.scale[2:])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_are_not_finite_stay_visible(value):
    weight = jnp.asarray([[value], [1.0], [2.0], [3.0]])
    assert not np.isfinite(dequantize_weight(*quantize_weight(weight, 1, "int8", None), jnp.float32)).all()


def test_smaller_tiles_are_closer():
    x, exact = jax.random.normal(jax.random.key(1), (9, 128)), build(Linear.Config())
    errors = [
        float(jnp.linalg.norm(build(WeightOnlyLinear.Config(storage="int4", tile_size=t))(x) - exact(x)))
        for t in (None, 32, 8)
    ]
    assert errors[0] > errors[1] > errors[2]


def test_tiles_divide_the_input():
    with pytest.raises(RequestError, match="tile_size=48 does not divide the input dimension 128"):
        build(WeightOnlyLinear.Config(tile_size=48))


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "share"), [("int8", 0.27), ("int4", 0.145)])
def test_a_stored_model_computes_the_same_from_less(toy, batch, storage, share):
    config = toy({"model.decoder.hidden_dim": 128, "model.decoder.layer.feed_forward.hidden_dim": 256})
    dense, serving = (
        Functional.from_config(config.model),
        Functional.from_config(weight_only_config(config, storage, tile_size=None).model),
    )
    params = jax.jit(dense.init, compiler_options=QUICK)(jax.random.key(0))
    stored_params = quantize_params(params, serving)
    assert {p: (x.shape, x.dtype) for p, x in stored_params.items()} == {
        p: (s.shape, s.dtype) for p, s in serving.abstract.items()
    }
    maps = [p.removesuffix("_scale") for p in stored_params if p.endswith("weight_scale")]
    assert len(maps) == 7
    small = size({p: x for p, x in stored_params.items() if p.startswith(tuple(maps))})
    assert small / size({p: params[p] for p in maps}) < share
    one, two = (
        jax.jit(lambda p, f=f: f.bind(p).loss(batch)[0], compiler_options=QUICK)(v)
        for f, v in ((dense, params), (serving, stored_params))
    )
    assert one != two
    assert abs(float(one - two)) < (0.002 if storage == "int8" else 0.05) * float(one)
    with pytest.raises(RequestError, match="has no parameter"):
        quantize_params({p: x for p, x in params.items() if "query" not in p}, serving)


@pytest.mark.slow
def test_stored_experts_compute_the_same(toy, batch):
    config = MoE(num_experts=4).apply(toy({"model.decoder.num_layers": 1}))
    dense, serving = (
        Functional.from_config(config.model),
        Functional.from_config(
            weight_only_config(config, "int8", tile_size=16, target="model.**.feed_forward.*").model
        ),
    )
    assert serving.abstract["decoder.layer.feed_forward.up.weight_scale"].shape == (1, 4, 2, 64)
    params = jax.jit(dense.init, compiler_options=QUICK)(jax.random.key(0))
    stored_params = quantize_params(params, serving)
    one, two = (
        jax.jit(lambda p, f=f: f.bind(p).loss(batch)[0], compiler_options=QUICK)(v)
        for f, v in ((dense, params), (serving, stored_params))
    )
    assert one != two
    assert abs(float(one - two)) < 0.002 * float(one)


def test_only_what_the_target_fits_is_stored(toy):
    stored_config = weight_only_config(toy(), "int4", tile_size=16, target="model.**.feed_forward.*")
    assert {p.rpartition(".")[2] for p in find(stored_config, WeightOnlyLinear)} == {"gate", "up", "down"}
    assert stored_config.learner == NoLearner.Config()
    with pytest.raises(ConfigError, match="does not match any linear map"):
        weight_only_config(toy(), "int8", tile_size=None, target="model.**.gat")


def test_training_integer_weights_is_refused_before_anything_is_written(tmp_path):
    config = weight_only_config(ax.resolve("quickstart").config, "int8", tile_size=None, target="model.**")
    with pytest.raises(RequestError, match="its weights are stored as integers"):
        ax.train(config, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_stored_run_generates_and_refuses_to_train(tmp_path):
    settings = {
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_dim": 32,
        "model.decoder.layer.attention.num_heads": 2,
        "model.decoder.layer.feed_forward.hidden_dim": 32,
        "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
        "input.batch_size": 8,
        "input.sequence_length": 16,
        "evaluators": {},
        "trackers": [{"type": "jsonl"}],
    }
    with jax.numpy_dtype_promotion("standard"):
        ax.train("quickstart", set=settings, steps=2, run_dir=tmp_path / "run")
        for storage in ("int8", "int4"):
            before, after = quantize_run(tmp_path / "run", tmp_path / storage, storage=storage)
            assert after < before
            loaded = ax.load(tmp_path / storage)
            if storage == "int4":
                with pytest.raises(RequestError, match="unstack takes 4-bit integers"):
                    loaded.program.export(tmp_path / "exported", {"unstack": [None]})
                assert not (tmp_path / "exported").exists()
            assert loaded.step == 2
            assert isinstance(loaded.generate("def ", max_tokens=3), str)
            arrays = manifest.inspect(tmp_path / storage / "checkpoints", 2).arrays
            assert arrays["params.decoder.layer.feed_forward.up.weight"].dtype == storage
        files = {path: path.read_bytes() for path in (tmp_path / "int8").rglob("*") if path.is_file()}
        with pytest.raises(RequestError, match="its weights are stored as integers"):
            ax.train(tmp_path / "int8" / "config.yaml", steps=3, run_dir=tmp_path / "int8")
        assert {path: path.read_bytes() for path in (tmp_path / "int8").rglob("*") if path.is_file()} == files
    with pytest.raises(RequestError, match="already exists"):
        quantize_run(tmp_path / "run", tmp_path / "int8", storage="int8")
    with pytest.raises(CheckpointError, match="not a run directory"):
        quantize_run(tmp_path / "nowhere", tmp_path / "x", storage="int8")
    dense, small = (np.asarray(ax.load(tmp_path / n).model(jnp.ones((1, 8), jnp.int32))) for n in ("run", "int8"))
    assert 0 < np.abs(dense - small).max() < 0.05 * np.abs(dense).max()
