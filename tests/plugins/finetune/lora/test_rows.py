"""Adapters for rows: each row equals the output of a map with only its adapter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axlearn_core.errors import RequestError
from axlearn_core.nn.layer import Precision
from axlearn_plugins_finetune.lora.adapters import AdapterExport
from axlearn_plugins_finetune.lora.lora_linear import LoraLinear
from axlearn_plugins_finetune.lora.rows import RowAdapters, RowLoraLinear, row_adapters

SHAPES = {"input_dims": (6,), "output_dims": (2, 4), "axes": ("embed", "heads", "head_dim")}


def built(config):
    return config.build(rngs=nnx.Rngs(0), precision=Precision("float32", "float32"), **SHAPES)


def exported(rank, scale, seed):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((6, rank)), rng.standard_normal((rank, 2, 4))
    arrays = {"map.lora_a": jnp.asarray(a, jnp.float32), "map.lora_b": jnp.asarray(b, jnp.float32)}
    return AdapterExport(arrays, {"map": scale}, base="")


def test_each_row_has_its_own_adapter():
    adapters_by_name = {"two": exported(2, 0.5, 1), "three": exported(3, 2.0, 2)}
    adapters = RowAdapters(adapters_by_name)
    assert adapters.rank == 3
    rows = built(RowLoraLinear.Config(count=2, rank=3))
    specs = {"map.weight": rows.weight, "map.rows_a": rows.rows_a, "map.rows_b": rows.rows_b}
    specs = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in specs.items()}
    arrays = adapters.arrays(specs)
    rows.rows_a[...], rows.rows_b[...] = jnp.asarray(arrays["map.rows_a"]), jnp.asarray(arrays["map.rows_b"])
    x = jnp.asarray(np.random.default_rng(3).standard_normal((5, 1, 6)), jnp.float32)
    choice = [None, "three", "two", "two", None]
    columns = [-1 if name is None else list(adapters_by_name).index(name) for name in choice]
    with row_adapters(jax.nn.one_hot(jnp.asarray(columns), 2, dtype=jnp.float32)):
        y = rows(x)
    assert y.shape == (5, 1, 2, 4)
    for index, name in enumerate(choice):
        expected = rows(x[index])  # without a choice: the base
        if name is not None:
            adapter = adapters_by_name[name]
            rank = adapter.params["map.lora_a"].shape[-1]
            one = built(LoraLinear.Config(rank=rank, alpha=rank * adapter.scales["map"]))
            one.weight[...] = rows.weight[...]
            one.lora_a[...], one.lora_b[...] = (adapter.params[f"map.lora_{side}"] for side in "ab")
            expected = one(x[index])
        np.testing.assert_allclose(y[index], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[0], rows(x)[0])


def test_other_rows_than_were_chosen_for_are_refused():
    rows = built(RowLoraLinear.Config())
    with row_adapters(jnp.zeros((4, 1))), pytest.raises(RequestError, match="chosen for 4 rows"):
        rows(jnp.zeros((5, 1, 6)))
    with pytest.raises(RequestError, match="experts"):
        rows.grouped(jnp.zeros((5, 6)), None)


def test_an_adapter_that_moved_variables_is_refused(tmp_path, monkeypatch):
    moved = AdapterExport({}, {}, base="", variables={"norm.mean": jnp.zeros(3)})
    monkeypatch.setattr("axlearn_plugins_finetune.lora.rows.load", lambda directory: moved)
    with pytest.raises(RequestError, match=r"(?s)adapter one: training also changed the base's variables.*norm\.mean"):
        RowAdapters.read({"one": str(tmp_path)})
