"""Unsupported contents of models: one clear error each, also from `config check`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from axlearn_core import configure, patch
from axlearn_core.compose import Functional
from axlearn_core.compose.objective import decide_replication
from axlearn_core.compose.program import check_program
from axlearn_core.config import Configurable, interface, node
from axlearn_core.errors import ConfigError
from axlearn_core.nn.layer import Layer
from axlearn_core.plugins.resolve import resolve
from axlearn_core.train.trainer import Trainer
from support import toy_models

FEED_FORWARD = "model.decoder.layer.feed_forward"


class Part(nnx.Module):
    """[B, S, D] -> [B, S, D]."""

    def __call__(self, x):
        return x


class RawArray(Part):
    def __init__(self, input_dim: int):
        self.table = jnp.ones(input_dim)


class NumpyArray(Part):
    def __init__(self, input_dim: int):
        self.table = np.ones(input_dim)


class ListOfArrays(Part):
    def __init__(self, input_dim: int):
        self.tables = [jnp.ones(input_dim)]


class NnxListOfArrays(Part):
    def __init__(self, input_dim: int):
        self.tables = nnx.List([jnp.ones(input_dim)])


class Key(Part):
    def __init__(self, input_dim: int):
        self.noise = nnx.Variable(jax.random.key(0))


class LinenInside(Part):
    def __init__(self, input_dim: int):
        self.dense = linen.Dense(input_dim)


class Unseeded(Part):
    def __init__(self, input_dim: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(input_dim))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x):
        return self.dropout(x)


class Constants(Part):
    """Numbers as plain values are not arrays."""

    def __init__(self, input_dim: int):
        self.numbers, self.scale = (0.5, 0.25), np.float32(2.0)

    def __call__(self, x):
        return x * jnp.asarray(self.numbers[0], x.dtype)


def with_part(part):
    return patch(toy_models.small("llama2-7b"), {FEED_FORWARD: configure(part)})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (RawArray, rf"{FEED_FORWARD}: 'table' holds arrays outside variables(.|\n)*float32\[32\](.|\n)*nnx.Param"),
        (NumpyArray, rf"{FEED_FORWARD}: 'table' holds arrays outside variables"),
        (ListOfArrays, rf"{FEED_FORWARD}: 'tables' holds arrays outside variables"),
        (NnxListOfArrays, "holds arrays outside variables"),
        (Key, rf"{FEED_FORWARD}: 'noise' holds a random key outside a stream(.|\n)*rngs.fork"),
        (LinenInside, rf"{FEED_FORWARD} \(dense\): is a module of Linen(.|\n)*fix: wrap it: {{type: linen-layer"),
    ],
)
def test_what_a_model_may_not_hold(part, message):
    with pytest.raises(ConfigError, match=message):
        Functional.from_config(with_part(part).model)


def test_a_linen_module_in_a_slot():
    cfg = patch(toy_models.small("llama2-7b"), {FEED_FORWARD: configure(linen.Dense, "features=input_dim")})
    with pytest.raises(ConfigError, match=rf"{FEED_FORWARD}: is a module of Linen(.|\n)*got: flax.linen.linear.Dense"):
        Functional.from_config(cfg.model)


def test_numbers_may_be_plain_attributes():
    assert Functional.from_config(with_part(Constants).model).num_parameters > 0


def test_a_stream_without_a_seed():
    alone = r"^model \(decoder.layer.feed_forward.dropout\): has no source of random numbers"
    with pytest.raises(ConfigError, match=alone):
        Functional.from_config(with_part(Unseeded).model)
    cfg = resolve(with_part(Unseeded), with_=["dropout:rate=0.1"]).config  # streams, of which one may be passed on
    functions = cfg.functions(Functional.from_config(cfg.model))
    with pytest.raises(ConfigError, match="has no source of random numbers"):
        jax.eval_shape(
            functions["train"].call, jax.eval_shape(functions["init"].call, jax.random.key(0)), dict(toy_models.batch())
        )


def seeded():
    model = nnx.RMSNorm
    return patch(toy_models.small("llama2-7b"), {"model.**.norm": configure(model, "num_features=dim")})


def test_unnamed_parameters_are_reported_as_replicated():
    functional = Functional.from_config(seeded().model)
    (decision,) = decide_replication(functional)
    assert decision.subject == "decoder.layer.attention_norm, decoder.layer.feed_forward_norm, decoder.norm"
    assert "3 parameters" in decision.reason
    unnamed_axes = configure(nnx.RMSNorm, "num_features=dim", scale_metadata={"out_sharding": ["norm"]})
    functional = Functional.from_config(patch(seeded(), {"model.**.norm": unnamed_axes}).model)
    assert functional.axes["decoder.layer.attention_norm.scale"] == ("layers", "norm")
    assert decide_replication(functional) == ()


@pytest.mark.parametrize("experiment", toy_models.experiments())
def test_all_parameters_of_what_is_shipped_have_names(experiment):
    assert decide_replication(Functional.from_config(toy_models.small(experiment).model)) == ()


class Wrong(Layer):
    """Returns another width than the residual stream has."""

    @node
    class Config(Layer.Config["Wrong"]):
        input_dim: int = interface()

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)

    def __call__(self, x):
        return jnp.concatenate([x, x], -1)


def test_the_check_builds_and_traces():
    cfg = patch(toy_models.small("llama2-7b"), {"input.batch_size": 8, "input.sequence_length": 16})
    assert check_program(cfg).model.num_parameters > 0
    with pytest.raises(ConfigError, match="'table' holds arrays"):
        check_program(patch(cfg, {FEED_FORWARD: configure(RawArray)}))
    with pytest.raises(TypeError, match="add got incompatible shapes"):
        check_program(patch(cfg, {FEED_FORWARD: Wrong.Config()}))
    with pytest.raises(ConfigError, match=r"learner.optimizer: does not build an optimizer(.|\n)*got: .*Constants"):
        check_program(patch(cfg, {"learner.optimizer": configure(Constants, input_dim=3)}))


class Stateful(nnx.Module):
    """An input, a learner or an evaluator that is a module with variables."""

    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))


class Holds(Configurable):
    """An input that holds such a module."""

    def __init__(self, cfg):
        self.module = Stateful()


def test_only_the_model_may_hold_modules_with_variables():
    cfg = toy_models.small("quickstart")
    with pytest.raises(ConfigError, match=r"^learner: is a module with variables outside the model"):
        check_program(patch(cfg, {"learner": configure(Stateful)}))
    for part, path in ((configure(Stateful), "input"), (Holds.Config(), r"input \(module\)")):
        with pytest.raises(ConfigError, match=rf"^{path}: is a module with variables(.|\n)*got: Stateful with count"):
            Trainer.Config.build_input(cfg, part, 8)
