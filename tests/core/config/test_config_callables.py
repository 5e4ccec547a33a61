"""`configure` takes the classes and functions of other libraries as they are."""

import dataclasses
import functools
import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

from axlearn_core.config import check, configure, dump, encode, flatten
from axlearn_core.errors import ConfigError, RequestError
from axlearn_core.nn.layer import Precision

# A class, what its parent offers under which name, its settings, and the shape of what it takes.
NNX = [
    (nnx.RMSNorm, ("num_features=dim",), {"epsilon": 1e-5}, (2, 8)),
    (nnx.LayerNorm, ("num_features=dim",), {}, (2, 8)),
    (nnx.GroupNorm, ("num_features=dim",), {"num_groups": 2}, (2, 8)),
    (nnx.InstanceNorm, ("num_features=dim",), {}, (2, 3, 8)),
    (nnx.BatchNorm, ("num_features=dim",), {"momentum": 0.9}, (2, 8)),
    (nnx.Linear, ("in_features=input_dim",), {"out_features": 4}, (2, 8)),
    (nnx.LinearGeneral, ("in_features=input_dim",), {"out_features": [2, 4]}, (2, 8)),
    (nnx.Einsum, (), {"einsum_str": "bi,ij->bj", "kernel_shape": [8, 3]}, (2, 8)),
    (nnx.Conv, ("in_features=input_dim",), {"out_features": 4, "kernel_size": [3]}, (2, 6, 8)),
    (nnx.ConvTranspose, ("in_features=input_dim",), {"out_features": 4, "kernel_size": [3]}, (2, 6, 8)),
    (nnx.MultiHeadAttention, ("in_features=input_dim",), {"num_heads": 2, "decode": False}, (2, 6, 8)),
    (nnx.LoRA, ("in_features=input_dim", "out_features=dim"), {"lora_rank": 2}, (2, 8)),
    (nnx.LoRALinear, ("in_features=input_dim", "out_features=dim"), {"lora_rank": 2}, (2, 8)),
    (nnx.PReLU, (), {}, (2, 8)),
    (nnx.Dropout, (), {"rate": 0.5}, (2, 8)),
    (nnx.Sequential, (), {"fns": (configure(nnx.PReLU), configure(nnx.Dropout, rate=0.5))}, (2, 8)),
]


def offered(dtype="float32"):
    return {"rngs": nnx.Rngs(0), "dim": 8, "input_dim": 8, "precision": Precision("float32", dtype), "axes": ("a", "b")}


@pytest.mark.parametrize(("cls", "names", "settings", "shape"), NNX, ids=lambda v: getattr(v, "__name__", ""))
def test_layers_of_flax_nnx(cls, names, settings, shape):
    node = check(configure(cls, *names, **settings))
    assert pickle.loads(pickle.dumps(node)) == node

    def run():
        layer = node.build(**offered())
        assert type(layer) is cls
        return layer(jnp.ones(shape))

    assert jax.eval_shape(run).shape[:-1] == shape[:-1] or cls is nnx.LinearGeneral


def test_an_embedding_and_a_cell_of_flax_nnx():
    embed = configure(nnx.Embed, "num_embeddings=vocab_size", "features=dim").build(vocab_size=5, **offered())
    assert embed(jnp.zeros((2, 3), jnp.int32)).shape == (2, 3, 8)
    cell = configure(nnx.LSTMCell, "in_features=input_dim", hidden_features=4).build(**offered())
    assert cell.hidden_features == 4


def test_random_streams_of_flax_are_seeded_by_the_parent():
    assert configure(nnx.Dropout, rate=0.5).build(**offered()).rngs is not None


def test_dtypes_follow_the_parent_unless_they_are_set():
    node = configure(nnx.Linear, "in_features=dim", out_features=4)
    layer = node.build(**offered("bfloat16"))
    assert (layer(jnp.ones((1, 8))).dtype, layer.kernel.dtype) == (jnp.bfloat16, jnp.float32)
    layer = configure(nnx.Linear, "in_features=dim", out_features=4, dtype="float32").build(**offered("bfloat16"))
    assert layer(jnp.ones((1, 8))).dtype == jnp.float32


class Scale(eqx.Module):
    weight: jax.Array
    power: int = eqx.field(static=True, default=1)


class Needs(eqx.Module):
    weight: jax.Array

    def __init__(self, size: int, *, key):
        self.weight = jax.random.normal(key, (size,))


class Dense(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.features)(x)


@dataclasses.dataclass
class Plain:
    size: int
    name: str = "w"


def test_modules_of_linen_and_equinox_and_plain_classes():
    assert configure(Dense, features=3).build(**offered()) == Dense(features=3)
    assert configure(linen.Dense, "features=dim").build(**offered()).features == 8
    assert configure(Needs, "size=dim").build(**offered()).weight.shape == (8,)
    assert configure(eqx.nn.Linear, "in_features=dim", out_features=3).build(**offered()).weight.shape == (3, 8)
    assert configure(Scale, power=2).power == 2
    assert configure(Plain, size=3).build(**offered()) == Plain(3)
    layers = (configure(eqx.nn.Linear, "in_features=dim", "out_features=dim"), configure(eqx.nn.Dropout, p=0.5))
    instance = configure(eqx.nn.Sequential, layers=layers).build(**offered())
    assert [type(layer) for layer in instance.layers] == [eqx.nn.Linear, eqx.nn.Dropout]


def makes_a_transformation(function):
    returned = inspect.signature(function).return_annotation
    return "GradientTransformation" in getattr(returned, "__name__", str(returned))


OPTAX = sorted(n for n, f in vars(optax).items() if inspect.isfunction(f) and makes_a_transformation(f))


NEEDS_MORE = ("chain", "noisy_sgd", "optimistic_adam")  # a member, a seed; the last is deprecated


def test_optax_has_many():
    assert len(OPTAX) > 40


@pytest.mark.parametrize("name", OPTAX)
def test_functions_of_optax(name):
    function = getattr(optax, name)
    node = configure(function)
    assert pickle.loads(pickle.dumps(node)) == node
    hash(node)
    flatten(node)
    required = {
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if required <= {"learning_rate"} and name not in NEEDS_MORE:
        instance = configure(function, **dict.fromkeys(required, 0.1)).build(max_steps=3)
        instance.init({"w": jnp.ones((2, 2))})


def test_transformations_in_a_chain():
    chain = configure(optax.chain, args=(configure(optax.clip, max_delta=1.0), configure(optax.sgd, learning_rate=0.5)))
    instance = chain.build(max_steps=3)
    updates, _ = instance.update({"w": jnp.full(2, 4.0)}, instance.init({"w": jnp.ones(2)}))
    assert updates["w"].tolist() == [-0.5, -0.5]


def test_a_partial_is_its_function_with_settings():
    node = configure(functools.partial(nnx.Linear, 3, use_bias=False), out_features=4)
    assert node == configure(nnx.Linear, in_features=3, use_bias=False, out_features=4)
    assert node.build(**offered()).bias is None


def both(a, /, b, *rest, c=1):
    return (a, b, rest, c)


def test_arguments_without_a_name():
    assert configure(both, a=1, b=2).build() == (1, 2, (), 1)
    assert configure(both, a=1, b=2, rest=[3, 4], c=5).build() == (1, 2, (3, 4), 5)


def anything(size: int, **more):
    return (size, more)


def test_a_function_that_takes_anything_gets_what_it_names():
    assert configure(anything, size=3).build(**offered()) == (3, {})


@pytest.mark.parametrize(
    ("function", "names", "settings", "message"),
    [
        (nnx.RMSNorm, ("num_feature=dim",), {}, "has no parameter 'num_feature'; did you mean: num_features"),
        (nnx.Linear, (), {"use_biases": True}, "has no parameter 'use_biases'; did you mean: use_bias"),
        (linen.Dense, (), {"feature": 3}, "has no parameter 'feature'; did you mean: features"),
        (eqx.nn.Linear, (), {"in_feature": 3}, "has no parameter 'in_feature'; did you mean: in_features"),
        (optax.lion, (), {"learningrate": 3}, "has no parameter 'learningrate'; did you mean: learning_rate"),
    ],
)
def test_wrong_names(function, names, settings, message):
    with pytest.raises(RequestError, match=message):
        configure(function, *names, **settings)


def test_what_the_parent_does_not_offer():
    with pytest.raises(
        ConfigError, match=r"RMSNorm requires 'dims', which its parent does not offer(.|\n)*did you mean: dim\?"
    ):
        configure(nnx.RMSNorm, "num_features=dims").build(**offered())


def test_a_function_without_a_signature():
    with pytest.raises(RequestError, match="has no signature"):
        configure(max)


class Names:
    def get_name(self, cls):
        return "thing"


def test_defaults_that_no_file_can_hold_stay_out_of_it():
    text = dump(encode(configure(nnx.Linear, "in_features=dim", out_features=4), Names()))
    assert "out_features: 4" in text
    assert "kernel_init" not in text
