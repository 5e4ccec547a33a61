"""Weights of runs: read onto any mesh, parameters only; every wrong request has one clear error."""

import json
from typing import ClassVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axlearn_core as ax
from axlearn_core.checkpoint import LocalStorage
from axlearn_core.compose import Functional
from axlearn_core.config import Configurable, node, patch
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.learn.paths import format_key_path
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write
from axlearn_core.run import open_weights

SETTINGS = {"model.decoder.num_layers": 2, "model.decoder.hidden_dim": 16, "model.vocab_size": 64}
HEAD = "decoder.norm.weight"


class Counting(LocalStorage):
    """Remembers which files were read."""

    def __init__(self, root):
        super().__init__(root)
        self.files = set()

    def read(self, path):
        self.files.add(path)
        return super().read(path)

    def read_into(self, path, begin, buffer):
        self.files.add(path)
        super().read_into(path, begin, buffer)


def write_run(run, *, steps=(10,), params=None, **settings):
    """A run as training writes it, whose average (where it keeps one) is twice its parameters."""
    config = ax.resolve("quickstart", set={**SETTINGS, **settings}).config
    model = Functional.from_config(config.model)
    params = params or {
        p: jax.random.normal(jax.random.key(i), s.shape) for i, (p, s) in enumerate(model.abstract.items())
    }
    learner = config.learner.build(max_steps=9, axes=model.axes).init(params)
    if learner.ema is not None:
        learner = learner._replace(ema={p: 2 * x for p, x in params.items()})
    run.mkdir()
    (run / "config.yaml").write_text(write(config, registry()))
    checkpointer = config.checkpointer.build(directory=run / "checkpoints")
    for step in steps:
        state = {"step": jnp.int32(step), "params": params, "learner": learner}
        checkpointer.save(step, state, extra={"step": step}, metrics={})
    checkpointer.close()
    return params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "run"
    return path, write_run(path, steps=(10, 20))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


def split(shape, mesh):
    axis = next((i for i, n in enumerate(shape) if n % 8 == 0), None)
    return NamedSharding(mesh, P(*(None,) * axis, "fsdp") if axis is not None else P())


@pytest.mark.slow
def test_weights_are_read_onto_any_mesh_and_nothing_else_is(run, mesh):
    path, params = run
    storage = Counting(path)
    weights = open_weights(path, storage=storage)
    assert weights.step == 20
    assert {p: (s.shape, s.dtype) for p, s in weights.specs().items()} == {
        p: (x.shape, x.dtype) for p, x in params.items()
    }
    assert not [f for f in storage.files if f.endswith(".bin")], "specs read no tensor"
    shardings = {p: split(x.shape, mesh) for p, x in params.items()}
    tensors = weights.read("**", shardings)
    assert {p: x.sharding for p, x in tensors.items()} == shardings
    for name, x in params.items():
        np.testing.assert_array_equal(tensors[name], x, err_msg=name)
    assert {f for f in storage.files if "/state/" in f} == {
        f"checkpoints/20/state/{name}" for name in ("weights/0-0.bin", "index/0.bin")
    }


def test_a_pattern_and_no_shardings_read_a_part_onto_one_device(run):
    path, params = run
    tensors = open_weights(path, step=10).read("decoder.**.attention.**")
    assert set(tensors) == {p for p in params if ".attention." in p}
    assert all(len(x.sharding.device_set) == 1 for x in tensors.values())


@pytest.mark.fast_cases("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_a_run_keeps_averages_these_are_its_weights(tmp_path, dtype):
    ema = {"learner.ema_decay": 0.5, "learner.rules": [{"pattern": HEAD, "freeze": True}], "model.param_dtype": dtype}
    config = ax.resolve("quickstart", set={**SETTINGS, **ema}).config
    params = {p: jnp.ones(s.shape, s.dtype) for p, s in Functional.from_config(config.model).abstract.items()}
    config_learner = config.learner.build(max_steps=9, axes=Functional.from_config(config.model).axes)
    assert set(config_learner.init(params).ema) == params.keys() - {HEAD}
    write_averages(tmp_path / "run", config, params, config_learner)
    tensors = open_weights(tmp_path / "run").read()
    assert {p: (float(x.mean()), str(x.dtype)) for p, x in tensors.items()} == {
        p: (1.0 if p == HEAD else 2.0, dtype) for p in params
    }


def write_averages(run, config, params, learner):
    state = learner.init(params)
    state = state._replace(ema={p: 2 * x for p, x in state.ema.items()})
    run.mkdir()
    (run / "config.yaml").write_text(write(config, registry()))
    checkpointer = config.checkpointer.build(directory=run / "checkpoints")
    checkpointer.save(1, {"step": jnp.int32(1), "params": params, "learner": state}, extra={}, metrics={})
    checkpointer.close()


def refused(request, *expected, kind=CheckpointError):
    with pytest.raises(kind) as error:
        request()
    assert error.value.exit_code == 2
    for text in expected:
        assert text in str(error.value), error.value


def test_what_is_no_source_of_weights_is_refused(run, tmp_path):
    path, _ = run
    refused(lambda: open_weights("ftp://host/run"), "the scheme 'ftp' is unknown", kind=RequestError)
    refused(lambda: open_weights(tmp_path), "is not a run directory: it has no config.yaml")
    refused(lambda: open_weights(tmp_path / "no"), "is not a run directory: it does not exist")
    refused(lambda: open_weights(path, step=15), "has no checkpoint of step 15\n    steps: 10, 20")


def test_what_a_read_cannot_give_is_refused(run, mesh):
    weights, whole = open_weights(run[0]), NamedSharding(mesh, P())
    refused(lambda: weights.read("decoder.nrom.*"), "'decoder.nrom.*' matches no parameter", HEAD, kind=RequestError)
    wrong = {"decoder.norm.wieght": whole}
    refused(
        lambda: weights.read(HEAD, wrong),
        f"unknown: decoder.norm.wieght (did you mean: {HEAD}?)",
        f"without a sharding: {HEAD}",
        kind=RequestError,
    )


def test_a_damaged_shard_is_named_and_others_are_not_blamed(tmp_path):
    write_run(tmp_path / "run")
    file = tmp_path / "run/checkpoints/10/state/weights/0-0.bin"
    pages = file.parents[1] / "index/0.bin"
    pieces = json.loads(pages.read_text())["pieces"]
    offset = pieces[HEAD := f"params.{globals()['HEAD']}"][0][1]
    data = bytearray(file.read_bytes())
    data[offset + 3] ^= 1
    file.write_bytes(data)
    weights = open_weights(tmp_path / "run")
    refused(weights.read, "step 10", f"state/weights/0-0.bin: {HEAD}, bytes {offset} to", "got sha256")
    assert len(weights.read("decoder.layer.**")) > 3, "what lies elsewhere is read"
    file.write_bytes(data[: offset + 3])
    refused(lambda: weights.read("decoder.norm.*"), "state/weights/0-0.bin: ", "is too short")
    pages.write_bytes(pages.read_bytes().replace(b"params", b"Params", 1))
    refused(open_weights(tmp_path / "run").read, "state/index/0.bin: bytes 0 to", "got sha256")


def test_tensors_of_another_model_are_listed(tmp_path):
    write_run(tmp_path / "run")
    config = ax.resolve("quickstart", set={**SETTINGS, "model.decoder.hidden_dim": 32}).config
    (tmp_path / "run/config.yaml").write_text(write(config, registry()))
    refused(lambda: open_weights(tmp_path / "run"), f"differs: {HEAD}: [16] stored, [32] in the model")
    config = ax.resolve("quickstart", set={**SETTINGS, "model.decoder.layer.attention.query.bias": True}).config
    (tmp_path / "run/config.yaml").write_text(write(config, registry()))
    refused(
        lambda: open_weights(tmp_path / "run"),
        "missing: decoder.layer.attention.query.bias [2, ",
        "the tensors of",
    )


def test_variables_are_weights_too_and_have_to_be_those_of_the_model(tmp_path, monkeypatch):
    mean = jax.ShapeDtypeStruct((4,), jnp.float32)
    write_run(tmp_path / "run")
    plain = Functional.from_config
    monkeypatch.setattr(
        Functional, "from_config", lambda config: attrs.evolve(plain(config), variables={"decoder.mean": mean})
    )
    refused(lambda: open_weights(tmp_path / "run"), "missing: decoder.mean [4]")


def test_a_path_outside_of_a_storage_is_refused(tmp_path):
    with pytest.raises(Exception, match="is not a path below"):
        LocalStorage(tmp_path).read("../x")


class Pickled(Configurable):
    """A checkpointer that knows only whole states."""

    @node
    class Config(Configurable.Config["Pickled"]):
        pass

    kept: ClassVar = {}

    def __init__(self, cfg, *, directory):
        pass

    def steps(self):
        return sorted(self.kept)

    def restore(self, step, like):
        flat = self.kept[step]
        return jax.tree_util.tree_map_with_path(
            lambda k, x: flat.get(format_key_path(k), jnp.zeros(x.shape, x.dtype)), like
        ), {}

    def close(self):
        pass


def test_another_checkpointer_restores_whole_states(tmp_path, monkeypatch):
    config = patch(ax.resolve("quickstart", set=SETTINGS).config, {"checkpointer": Pickled.Config()})
    params = {p: jnp.full(s.shape, 3, s.dtype) for p, s in Functional.from_config(config.model).abstract.items()}
    monkeypatch.setattr(Pickled, "kept", {7: {f"params.{p}": x for p, x in params.items()}})
    monkeypatch.setattr("axlearn_core.run.run.read_run_config", lambda storage, uri: config)
    weights = open_weights(tmp_path)
    assert weights.step == 7
    assert all((x == 3).all() for x in weights.read().values())
    refused(lambda: open_weights(tmp_path, step=8), "has no checkpoint of step 8\n    steps: 7")
