"""Linen and Equinox modules as layers of a transformer: parameters, variables, random numbers, evaluation, layouts."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from axlearn_core import compose, configure, patch, train
from axlearn_core.compose import Functional
from axlearn_core.compose.objective import decide_replication
from axlearn_core.errors import ConfigError
from axlearn_core.nn.layer import Precision
from axlearn_core.nn.summaries import add_summary
from axlearn_plugins_models.bridges.equinox_layer import EquinoxLayer
from axlearn_plugins_models.bridges.linen_layer import LinenLayer
from support import toy_models

FEED_FORWARD = "model.decoder.layer.feed_forward"
KEY = jax.random.key(3)


class Linen(linen.Module):
    """A feed-forward layer with many Linen features: named axes, dropout, batch statistics, a training flag."""

    hidden: int
    rate: float = 0.3

    @linen.compact
    def __call__(self, x, train: bool):
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        y = linen.gelu(linen.Dense(self.hidden, kernel_init=init)(x))
        y = linen.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        y = linen.Dropout(self.rate, deterministic=not train)(y)
        add_summary("hidden_mean", jnp.mean(y))
        return linen.Dense(x.shape[-1])(y)


class Equinox(eqx.Module):
    """A feed-forward layer for one position, with dropout."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    table: jax.Array

    def __init__(self, size: int, hidden: int, *, key):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(size, hidden, key=first)
        self.down = eqx.nn.Linear(hidden, size, key=second)
        self.dropout = eqx.nn.Dropout(0.3)
        self.table = jnp.arange(hidden)

    def __call__(self, x, key=None):
        return self.down(self.dropout(jax.nn.gelu(self.up(x)) + self.table.astype(x.dtype) * 0, key=key))


LINEN = LinenLayer.Config(module=configure(Linen, hidden=16), axes={"Dense_1.kernel": ("mlp", "embed")})
EQUINOX = EquinoxLayer.Config(
    module=configure(Equinox, "size=input_dim", hidden=16),
    axes={"up.weight": ("mlp", "embed"), "down.weight": ("embed", "mlp")},
)
NODES = {"linen": LINEN, "equinox": EQUINOX}


@functools.cache
def config(kind, **settings):
    tree = patch(toy_models.small("llama2-7b"), {"model.dtype": "float32", FEED_FORWARD: NODES[kind]})
    return patch(tree, {key.replace("__", "."): value for key, value in settings.items()})


def layer(node, **offered):
    return node.build(rngs=nnx.Rngs(0), precision=Precision(), input_dim=8, **offered)


def linen_layer(module):
    return LinenLayer.Config(module=configure(module))


def test_parameters_have_paths_and_axes_and_the_rest_is_replicated():
    model = Functional.from_config(config("linen").model)
    own = {p.partition("module.")[2]: model.axes[p] for p in model.abstract if ".module." in p}
    assert own["Dense_0.kernel"] == ("layers", "embed", "mlp")
    assert own["Dense_1.kernel"] == ("layers", "mlp", "embed")
    assert {p.partition("module.")[2] for p in model.unnamed} == own.keys() - {"Dense_0.kernel", "Dense_1.kernel"}
    (decision,) = decide_replication(model)
    assert str(decision).startswith("replicated: decoder.layer.feed_forward.module.BatchNorm_0, ")
    assert "4 parameters" in str(decision)
    assert [p.rpartition(".")[2] for p in model.variables] == ["mean", "var"]
    assert model.batch_dependence == (
        "decoder.layer.feed_forward draws random numbers",
        "decoder.layer.feed_forward.module.BatchNorm_0 normalizes over the batch",
    )
    model = Functional.from_config(config("equinox").model)
    own = {p.partition("module.")[2]: model.axes[p] for p in model.abstract if ".module." in p}
    assert own == {
        "up.weight": ("layers", "mlp", "embed"), "down.weight": ("layers", "embed", "mlp"),
        "up.bias": ("layers", None), "down.bias": ("layers", None),
    }  # fmt: skip
    assert list(model.variables) == ["decoder.layer.feed_forward.module.table"]


@pytest.mark.slow
def test_linen_computes_what_linen_computes():
    module, wrapped = Linen(hidden=16), layer(LINEN)
    params = {
        "Dense_0": {"kernel": wrapped.module.Dense_0.kernel[...], "bias": wrapped.module.Dense_0.bias[...]},
        "Dense_1": {"kernel": wrapped.module.Dense_1.kernel[...], "bias": wrapped.module.Dense_1.bias[...]},
        "BatchNorm_0": {"scale": wrapped.module.BatchNorm_0.scale[...], "bias": wrapped.module.BatchNorm_0.bias[...]},
    }
    statistics = {"BatchNorm_0": {"mean": jnp.full(16, 0.5), "var": jnp.full(16, 2.0)}}
    wrapped.module.BatchNorm_0.mean[...], wrapped.module.BatchNorm_0.var[...] = statistics["BatchNorm_0"].values()
    wrapped.eval()
    x = jax.random.normal(KEY, (2, 4, 8))
    expected = module.apply({"params": params, "batch_stats": statistics}, x, train=False)
    np.testing.assert_array_equal(wrapped(x), expected)
    np.testing.assert_array_equal(wrapped(x), wrapped(x))
    assert (wrapped.module.BatchNorm_0.mean[...] == 0.5).all(), "only read in evaluation"
    wrapped.train()
    assert not np.array_equal(wrapped(x), wrapped(x)), "dropout"
    assert not (wrapped.module.BatchNorm_0.mean[...] == 0.5).any()


def test_equinox_computes_what_equinox_computes():
    wrapped = layer(EQUINOX)
    module = Equinox(8, 16, key=nnx.Rngs(0).params())
    x = jax.random.normal(KEY, (2, 4, 8))
    wrapped.eval()
    expected = jax.vmap(jax.vmap(eqx.nn.inference_mode(module)))(x)
    np.testing.assert_allclose(wrapped(x), expected, rtol=1e-6, atol=1e-6)
    wrapped.train()
    first = wrapped(jnp.ones((2, 4, 8)))
    assert not np.array_equal(first, wrapped(jnp.ones((2, 4, 8))))
    assert len({row.tobytes() for row in np.asarray(first).reshape(8, 8)}) == 8, (
        "each position must have its own random numbers"
    )


@functools.cache
def trained(kind, mesh=(), **settings):
    tree = patch(config(kind, **settings), {"mesh.shape": dict(mesh)})
    program = compose(tree, jax.devices() if mesh else jax.devices()[:1])
    with toy_models.quick_to_compile():
        state, losses = program.init(seed=0), []
        for step in range(3):
            state, scalars = program.train_step(state, program.put(toy_models.batch(step)))
            losses.append(float(scalars["loss"]))
    return losses, jax.device_get(state.variables), state, program


UNROLLED, SHARDED = {"model__decoder__stack__mode": "unrolled"}, {"mesh": (("data", 2), ("fsdp", 2), ("tensor", 2))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("linen", UNROLLED),
        ("equinox", SHARDED),
        pytest.param("linen", SHARDED, marks=pytest.mark.slow),
        pytest.param("equinox", UNROLLED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_how_it_runs_changes_nothing(kind, how):
    one, other = trained(kind), trained(kind, **how)
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for path, value in one[1].items():
        np.testing.assert_allclose(value, other[1][path], rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NODES)
def test_evaluation_draws_nothing_and_writes_nothing(kind):
    _, _, state, program = trained(kind)
    batch = program.put(toy_models.batch())
    first, again = (float(program.eval_step(state, batch)["loss_sum"]) for _ in range(2))
    assert first == again
    losses = [
        float(program.functional.bind(state.params, state.variables, key).loss(batch)[0])
        for key in (jax.random.key(1), jax.random.key(2))
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind", NODES)
def test_in_bfloat16_parameters_stay_float32(kind):
    model = Functional.from_config(config(kind, model__dtype="bfloat16").model)
    assert {str(s.dtype) for s in model.abstract.values()} == {"float32"}
    loss, _ = jax.eval_shape(
        lambda p, v: model.bind(p, v, KEY).loss(toy_models.batch()), model.abstract, model.variables
    )
    assert loss.shape == ()


def test_linen_modules_with_dtypes_get_those_of_the_layer():
    node = LinenLayer.Config(module=configure(linen.Dense, features=4))
    wrapped = node.build(rngs=nnx.Rngs(0), precision=Precision("float32", "bfloat16"), dim=8)
    assert (wrapped.module.kernel.dtype, wrapped(jnp.ones((2, 8))).dtype) == (jnp.float32, jnp.bfloat16)


def test_a_module_that_never_draws_has_no_stream():
    mlp = configure(eqx.nn.MLP, "in_size=input_dim", "out_size=input_dim", width_size=4, depth=1)
    assert layer(EquinoxLayer.Config(module=mlp)).rngs is None
    assert layer(LinenLayer.Config(module=configure(linen.LayerNorm))).rngs is None
    assert layer(LinenLayer.Config(module=configure(linen.Dropout, rate=0.5))).rngs is not None


class Sows(linen.Module):
    @linen.compact
    def __call__(self, x):
        self.sow("losses", "balance", jnp.mean(x))
        return x


class Late(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        if train:
            self.variable("history", "latest", jnp.zeros, ())
        return x


def batch_norm():
    return eqx.nn.BatchNorm(8, "batch", mode="ema")


class KeepsKey(eqx.Module):
    key: jax.Array

    def __call__(self, x):
        return x


def keeps_key():
    return KeepsKey(jax.random.key(0))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (linen_layer(Sows), r"sows values(.|\n)*got: losses/balance"),
        (linen_layer(Late), r"got: history/latest"),
        (LinenLayer.Config(module=configure(keeps_key)), "does not build a module of Linen(.|\n)*got: .*KeepsKey"),
        (EquinoxLayer.Config(module=configure(linen.Dense, features=3)), "does not build a module of Equinox"),
        (EquinoxLayer.Config(module=configure(batch_norm)), r"has state(.|\n)*equinox-layer does not support"),
        (EquinoxLayer.Config(module=configure(keeps_key)), r"module \(key\): the Equinox module contains a random key"),
        (
            LinenLayer.Config(module=configure(linen.Dense, features=3), axes={"kernal": ("embed", "mlp")}),
            r"axes.kernal: matches no parameter(.|\n)*did you mean: kernel\?",
        ),
        (
            LinenLayer.Config(module=configure(linen.Dense, features=3), axes={"kernel": ("embed",)}),
            r"axes \(kernel\): must name one logical axis per dimension(.|\n)*2 names",
        ),
    ],
    ids=["sown", "late", "keeps-key", "linen-in-equinox", "state", "key", "unknown-axes", "short-axes"],
)
def test_what_is_refused(node, message):
    with pytest.raises(ConfigError, match=message):
        layer(node)


@pytest.mark.slow
def test_a_slot_that_says_no_shape():
    node = LinenLayer.Config(module=configure(linen.Dense, features=3))
    with pytest.raises(ConfigError, match="input_shape: Linen modules need a sample input"):
        node.build(rngs=nnx.Rngs(0), precision=Precision())
    assert patch(node, {"input_shape": [2, 5]}).build(rngs=nnx.Rngs(0), precision=Precision()).module.kernel.shape == (
        5,
        3,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", NODES)
def test_train_stop_and_go_on(kind, tmp_path):
    settings = {"evaluators": {}, "checkpointer.every_steps": 2, "log_every_steps": 1, "input.batch_size": 8}
    sizes = {k: v for k, v in toy_models.SIZES.items() if k not in ("model.vocab_size", f"{FEED_FORWARD}.hidden_dim")}
    more = {**sizes, **settings, "input.sequence_length": 32, FEED_FORWARD: NODES[kind]}
    rate = {"learner.optimizer": configure(optax.sgd, learning_rate=0.1)}
    with toy_models.quick_to_compile():
        train("quickstart", set=more | rate, steps=4, run_dir=tmp_path / "whole")
        train("quickstart", set=more | rate, steps=2, run_dir=tmp_path / "parts")
        train("quickstart", set=more | rate, steps=4, run_dir=tmp_path / "parts")
    losses = [
        {
            m["step"]: m["loss"]
            for m in map(json.loads, (tmp_path / d / "metrics.jsonl").read_text().splitlines())
            if "loss" in m
        }
        for d in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    lock = json.loads((tmp_path / "whole/run.lock.json").read_text())
    kinds = {d["kind"] for d in lock["decisions"]}
    assert {"replicated", "not registered"} <= kinds
