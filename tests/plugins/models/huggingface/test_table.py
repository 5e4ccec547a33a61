"""Rules: layouts of tensors in both directions, layers of one kind, and errors for shapes that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.compose import Functional
from axlearn_core.errors import ConfigError
from axlearn_core.nn.layer import Context
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_models.huggingface import decoder as d
from axlearn_plugins_models.huggingface import stream
from axlearn_plugins_models.huggingface.table import Rule, layout
from axlearn_plugins_recurrent.gated_delta_net import GatedDeltaNet
from axlearn_plugins_transformer.attention import Attention
from support.needs import needs
from support.tensor_files import store_tensors


class Arrays(nnx.Module):
    """A model that consists of parameters."""

    def __init__(self, arrays):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(jnp.asarray(array)))


def numbers(shapes, seed=0):
    """Return name -> array without equal values."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    values = np.random.default_rng(seed).permutation(sum(sizes)).astype(np.float32)
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def exported(tensors, params):
    """Return name -> array that an export writes."""
    outputs = [(name, "F32", tensor.shape) for name, tensor in tensors.items()]
    values = stream.values(tensors, params, [outputs])
    return {name: value for (name, _, _), value in zip(outputs, values, strict=True)}


def imported(tensors, arrays, like, directory):
    """Return the parameters that an import reads from {name: array}."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=sharding) for n, x in like.items()}
    return stream.read(tensors, store_tensors(directory, arrays), specs)


def interleave(gate, up):
    out = np.empty((*gate.shape[:-1], 2 * gate.shape[-1]), np.float32)
    out[..., ::2], out[..., 1::2] = gate, up  # as GptOssExperts splits them
    return out


def by_key_head(*parts, groups):
    """Return the layout of `in_proj_qkvz` in Qwen3-Next: for each key head, the rows of each part."""
    rows = [[np.split(p.reshape(p.shape[0], -1).T, groups)[g] for p in parts] for g in range(groups)]
    return np.concatenate([row for group in rows for row in group])


def flat(x, axes=1):
    """Return a matrix [outputs, inputs]."""
    return x.reshape(*x.shape[:axes], -1).T


LAYOUTS = {
    "squeezed": ({"a": (3, 2, 4)}, "(n h) 1 w -> w n h", lambda a: flat(a)[:, None]),
    "extra": ({"a": (1, 4, 2)}, "n d -> 1 d n", lambda a: a[0].T),
    "leading-one": ({"a": (5,)}, "1 1 d -> d", lambda a: a[None, None]),
    "convolution": (
        {"q": (3, 2, 4), "v": (3, 5, 2)}, "(n h)* 1 w -> w n h", lambda q, v: np.concatenate([flat(q), flat(v)])[:, None]
    ),
    "interleaved": ({"gate": (2, 4, 3), "up": (2, 4, 3)}, "e d (f part*) -> e d f", interleave),
    "interleaved-rows": ({"gate": (4, 3), "up": (4, 3)}, "(f part*) d -> d f", lambda g, u: interleave(g, u).T),
    "stacked": ({"q": (4, 3), "k": (4, 3)}, "part* n d -> d n", lambda q, k: np.stack([q.T, k.T])),
    "by-key-head": (
        {"q": (3, 2, 4), "k": (3, 2, 4), "v": (3, 6, 5), "z": (3, 6, 5)},
        ("(g h*) d -> d g h", "(g h*) d -> d g h", "(g (r h)*) d -> d (g r) h", "(g (r h)*) d -> d (g r) h"),
        lambda q, k, v, z: by_key_head(q, k, v, z, groups=2),
    ),
    "by-config": ({"b": (3, 6), "a": (3, 6)}, "(g r*) d -> d (g r)", lambda b, a: by_key_head(b, a, groups=2)),
    "ranks": (
        {"z": (3, 4, 2), "x": (3, 4, 2), "b": (3, 1, 5), "dt": (3, 4)},
        ("(n h)* d -> d n h", "(n h)* d -> d n h", "(n h)* d -> d n h", "n* d -> d n"),
        lambda *parts: np.concatenate([flat(p) for p in parts]),
    ),
    "last": ({"q": (3, 2, 4), "v": (3, 5, 2)}, "d (n h)* -> d n h", lambda q, v: np.concatenate([flat(q), flat(v)]).T),
    "not-adjacent": ({"a": (3, 8)}, "(r g) d -> d (g r)", lambda a: a.reshape(3, 2, 4).transpose(2, 1, 0).reshape(8, 3)),
}  # fmt: skip


@pytest.mark.parametrize("on_devices", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["host", "devices"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_written_and_read(name, on_devices, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "SLICE", 40)  # a few numbers, so that every tensor is read in several slices
    if on_devices:
        monkeypatch.setattr(stream, "in_host_memory", lambda sharding: False)
    shapes, pattern, expected = LAYOUTS[name]
    arrays = numbers(shapes)
    sizes = {"g": "num_groups"} if name in ("by-config", "not-adjacent") else {}
    rule = Rule(tuple(shapes), "t", pattern, sizes=sizes)
    tensors = layout(Functional.from_module(Arrays(arrays)), [rule], {"num_groups": 2})
    written = exported(tensors, arrays)
    assert np.array_equal(written["t"], expected(*arrays.values()))
    params = imported(tensors, written, arrays, tmp_path)
    assert all(np.array_equal(params[n], x) for n, x in arrays.items())


def test_experts_have_numbers_and_are_interleaved(tmp_path):
    arrays = numbers({"gate": (3, 4, 2), "up": (3, 4, 2)})
    tensors = layout(Functional.from_module(Arrays(arrays)), [Rule(("gate", "up"), "x.{e}", "(f part*) d -> e d f")])
    written = exported(tensors, arrays)
    assert {n: t.shape for n, t in tensors.items()} == {f"x.{e}": (4, 4) for e in range(3)}
    assert all(np.array_equal(written[f"x.{e}"][::2], arrays["gate"][e].T) for e in range(3))
    params = imported(tensors, written, arrays, tmp_path)
    assert all(np.array_equal(params[n], x) for n, x in arrays.items())


LINEAR, FULL, OURS = f"{d.THEIRS}.linear_attn", f"{d.THEIRS}.self_attn", f"{d.OURS}.attention"
PARTS = ("query", "key", "value", "gate")
BY_HEAD = "(g h*) d -> d g h", "(g (r h)*) d -> d (g r) h"
QWEN3_NEXT = (
    *d.OUTER_RULES, *d.NORM_RULES, *d.ATTENTION_RULES, *d.feed_forward_rules(),
    Rule(tuple(f"{OURS}.{p}.weight" for p in PARTS), f"{LINEAR}.in_proj_qkvz.weight",
         (BY_HEAD[0], BY_HEAD[0], BY_HEAD[1], BY_HEAD[1]), within=GatedDeltaNet),
    Rule((f"{OURS}.strength.weight", f"{OURS}.decay.weight"), f"{LINEAR}.in_proj_ba.weight", "(g r*) d -> d (g r)",
         within=GatedDeltaNet, sizes={"g": "linear_num_key_heads"}),
    Rule(tuple(f"{OURS}.convolutions.{p}.weight" for p in PARTS[:3]), f"{LINEAR}.conv1d.weight", "(n h)* 1 w -> w n h"),
    Rule(f"{OURS}.log_rate", f"{LINEAR}.A_log"),
    Rule(f"{OURS}.time_bias", f"{LINEAR}.dt_bias"),
    Rule(f"{OURS}.norm.weight", f"{LINEAR}.norm.weight"),
    Rule(f"{OURS}.output.weight", f"{LINEAR}.out_proj.weight", "d (n h) -> n h d", within=GatedDeltaNet),
)  # fmt: skip
"""Rules for the linear attention of Qwen3-Next, in a Llama."""


@pytest.fixture(scope="module")
def hybrid():
    """A model whose layers 0, 1, 3 and 4 have linear attention, with 2 key heads and 4 value heads."""
    options = {"num_key_heads": 2, "num_heads": 4, "key_dim": 8, "value_dim": 6, "attention_every": 3}
    sizes = {"model.decoder.num_layers": 5, "model.decoder.hidden_dim": 32, "model.vocab_size": 48}
    config = resolve("quickstart", with_={"gated-delta-net": options}, set=sizes).config
    return Functional.from_config(config.model)


def test_rules_apply_to_one_kind_of_layers(hybrid, tmp_path):
    tensors = layout(hybrid, QWEN3_NEXT, {"linear_num_key_heads": 2})
    numbered = {n.split(".")[3] + n.split(".")[2] for n in tensors if "attn" in n}
    assert numbered == {"linear_attn0", "linear_attn1", "linear_attn3", "linear_attn4", "self_attn2"}
    assert tensors["model.layers.3.linear_attn.in_proj_qkvz.weight"].shape == (2 * (8 + 8 + 12 + 12), 32)
    assert tensors["model.layers.0.linear_attn.conv1d.weight"].shape == (16 + 16 + 24, 1, 4)
    arrays = numbers({p: x.shape for p, x in hybrid.abstract.items()})
    written = exported(tensors, arrays)
    third = {p: arrays[f"decoder.layer.0.attention.{p}.weight"][2] for p in PARTS}  # of layers 0, 1, 3 and 4
    expected = by_key_head(*third.values(), groups=2)
    assert np.array_equal(written["model.layers.3.linear_attn.in_proj_qkvz.weight"], expected)
    query = arrays["decoder.layer.1.attention.query.weight"][0]
    assert np.array_equal(written["model.layers.2.self_attn.q_proj.weight"], flat(query))
    params = imported(tensors, written, arrays, tmp_path)
    assert all(np.array_equal(params[n], x) for n, x in arrays.items())


def test_a_rule_for_other_layers_does_not_apply(hybrid):
    path = f"{OURS}.query.weight"
    rules = [r for r in QWEN3_NEXT if path not in r.paths]
    rules += [Rule(path, f"{FULL}.q_proj.weight", "(n h) d -> d n h", within=Attention)]
    with pytest.raises(ConfigError) as caught:
        layout(hybrid, rules)
    text = str(caught.value)
    assert "decoder.layer.0.attention.query.weight): the Hugging Face format of this family has no counterpart" in text
    assert "got: shape [32, 2, 8] in a layer" in text
    assert f"expected: the axes and the layers of a rule for {path}: (n h) d -> d n h within Attention" in text
    assert "decoder.layer.1" not in text


MISFITS = {
    "unequal": ({"q": (3, 2, 4), "k": (5, 2, 4)}, {"pattern": "(n* h) d -> d n h"}, "[3, 2, 4], [5, 2, 4]"),
    "remainder": ({"a": (3, 8)}, {"pattern": "(g r) d -> d (g r)", "sizes": {"g": 3}}, "with g=3, d=3"),
    "unknown": ({"a": (3, 8)}, {"pattern": "(g r) d -> d (g r)"}, "set `sizes`"),
    "no-star": ({"q": (3, 2), "k": (3, 2)}, {"pattern": "n d -> d n"}, "'n d -> d n'"),
    "places": (
        {"q": (3, 2), "k": (3, 2)},
        {"pattern": ("n* d -> d n", "d n* -> d n")},
        "the shapes do not fit the pattern",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_shapes_that_do_not_fit_a_pattern_are_refused(name):
    shapes, options, expected = MISFITS[name]
    rule = Rule(tuple(shapes), "model.qk.weight", **options)
    with pytest.raises(ConfigError) as caught:
        layout(Functional.from_module(Arrays(numbers(shapes))), [rule])
    text = str(caught.value)
    assert f"model ({', '.join(shapes)}): the shapes do not fit the pattern of the tensor model.qk.weight" in text
    assert expected in text


def test_two_rules_for_one_tensor_are_refused():
    shapes = {"q": (3, 2), "k": (3, 2)}
    with pytest.raises(ConfigError, match=r"model \(k, q\): the shapes do not fit the pattern of the tensor t"):
        layout(Functional.from_module(Arrays(numbers(shapes))), [Rule("q", "t"), Rule("k", "t")])


@pytest.mark.parametrize(("value", "got"), [("GONE", "nothing"), ("2", "'2'"), (0, "0"), (True, "True")])
def test_a_size_that_config_json_does_not_state_is_refused(value, got):
    model = Functional.from_module(Arrays(numbers({"a": (3, 8)})))
    rule = Rule("a", "t", "(g r) d -> d (g r)", sizes={"g": "num_groups"})
    data = {"num_group": 2} | ({} if value == "GONE" else {"num_groups": value})
    with pytest.raises(ConfigError, match=f"config.json: num_groups: the layout of t needs this size\n    got: {got}"):
        layout(model, [rule], data)


@pytest.mark.slow
@needs("torch", "transformers")
def test_linear_attention_computes_what_qwen3_next_does(tmp_path):
    import torch
    from transformers.models.qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {"hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
             "linear_value_head_dim": 6, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}  # fmt: skip
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes, vocab_size=16, rms_norm_eps=1e-6), 0).eval()
    arrays = {f"model.layers.0.linear_attn.{n}": p.detach().numpy() for n, p in theirs.named_parameters()}
    options = {"num_key_heads": 2, "num_heads": 4, "key_dim": 8, "value_dim": 6, "attention_every": 0}
    config = resolve("quickstart", with_={"gated-delta-net": options}, set={
        "model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "model.decoder.layer.norm.eps": 1e-6,
    }).config  # fmt: skip
    model = Functional.from_config(config.model)
    needed = {p: x for p, x in model.abstract.items() if ".attention." in p}
    tensors = {n: t for n, t in layout(model, QWEN3_NEXT, sizes).items() if n in arrays}
    assert tensors.keys() == arrays.keys()
    params = imported(tensors, arrays, needed, tmp_path)
    prefix = "decoder.layer.attention."
    layer = nnx.eval_shape(lambda: config.model.build(rngs=nnx.Rngs(0))).decoder.layer.attention
    graph, state = nnx.split(layer)
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(params[prefix + ".".join(map(str, path))][0])
    x = np.random.default_rng(0).normal(size=(2, 9, 32)).astype(np.float32)
    got, _ = nnx.merge(graph, state)(jnp.asarray(x), Context())
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    assert np.abs(np.asarray(got) - expected).max() < 2e-5 * np.abs(expected).max()
