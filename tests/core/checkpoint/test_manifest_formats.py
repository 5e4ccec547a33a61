"""Checkpoints in format 3, which an earlier version wrote, and directories with both formats."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axlearn_core.checkpoint import manifest
from axlearn_core.errors import CheckpointError
from support.paths import FIXTURES


@pytest.fixture
def kind():
    return "sharded"


@pytest.fixture(params=["format3-one-process", "format3-two-processes"])
def directory(request, tmp_path):
    return shutil.copytree(FIXTURES / "checkpoints" / request.param, tmp_path / "checkpoints")


def state(step, mesh):
    """Return the state that the fixtures contain."""

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    w = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    return {
        "step": put(np.int32(step)),
        "rng": jax.random.key(step),
        "params": {
            "up.weight": put(w, "fsdp"),
            "down.weight": put(w * 2, None, "fsdp"),
            "norm.scale": put(w[0]),
        },
        "learner": {"mean": put((w * 3).astype(jnp.bfloat16), "fsdp")},
    }


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_format_3_restores_every_bit(make, directory, mesh):
    one = make(directory=directory)
    assert one.steps() == [10, 20]
    for step in one.steps():
        assert one.place.verify(step).format == 3
        restored, extra = one.restore(step, state(0, mesh))
        assert_same(restored, state(step, mesh))
        assert extra == {"step": step}


def test_a_directory_may_have_both_formats(make, directory, mesh):
    one = make(directory=directory, keep_last=2)
    one.run = "run"
    one.save(30, state(30, mesh), extra={"step": 30})
    one.wait()
    assert [(s, one.inspect(s).format) for s in one.steps()] == [(20, 3), (30, 4)]  # step 10 expired
    for step in one.steps():
        one.place.verify(step)
        assert_same(one.restore(step, state(0, mesh))[0], state(step, mesh))


def test_a_directory_with_both_formats_can_be_rolled_back(make, directory, mesh):
    one = make(directory=directory, keep_last=None)
    one.save(30, state(30, mesh))
    one.wait()
    two = make(directory=directory, keep_last=None)
    two.restore(10, state(0, mesh))
    two.save(11, state(11, mesh))
    two.wait()
    assert two.steps() == [10, 11]
    assert sorted(p.name.partition(".")[0] for p in directory.glob("*.superseded-*")) == ["20", "30"]


@pytest.mark.parametrize("name", ["state/weights/0.json", "state/others/0-0.bin", "config.yaml"])
def test_damage_in_format_3_is_found(make, directory, mesh, name):
    file = directory / "20" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"step 20 in [^$]*{name}: [^$]*got sha256[^$]*--restore-step 10"):
        make(directory=directory).restore(20, state(0, mesh))


@pytest.mark.parametrize("name", ["state/index/0.bin", "state/weights/0-0.bin", "manifest.json"])
def test_damage_in_format_4_is_found(make, directory, mesh, name):
    one = make(directory=directory, keep_last=None)
    one.save(30, state(30, mesh))
    one.wait()
    for change in (lambda data: data[:-1], lambda data: data[:5] + bytes([data[5] ^ 1]) + data[6:], lambda data: None):
        file = directory / "30" / name
        whole = file.read_bytes()
        file.unlink()
        if (damaged := change(whole)) is not None:
            file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"step 30 in [^$]*{name}: [^$]*--restore-step 20"):
            one.restore(30, state(0, mesh))
        with pytest.raises(CheckpointError, match=name):
            one.place.verify(30)
        file.write_bytes(whole)
    assert_same(one.restore(30, state(0, mesh))[0], state(30, mesh))


def test_small_files_are_joined(make, tmp_path, mesh, monkeypatch):
    from axlearn_core.checkpoint import writer

    def save(step, **sizes):
        one = make(directory=tmp_path / str(step))
        one.save(step, {"params": {"w": jnp.zeros(sizes["params"])}, "learner": jnp.zeros(sizes["learner"])})
        one.wait()
        one.place.verify(step)
        files = (tmp_path / str(step) / str(step) / "state").glob("[wo]*/*.bin")
        return {f"{f.parent.name}/{f.name}": f.stat().st_size // 4 for f in files}

    monkeypatch.setattr(writer, "SMALL", 400)
    monkeypatch.setattr(writer, "FILE", 4000)
    assert save(1, params=10, learner=20) == {"weights/0-0.bin": 30}
    assert save(2, params=200, learner=300) == {"weights/0-0.bin": 200, "others/0-0.bin": 300}
    assert save(3, params=10, learner=300) == {"others/0-0.bin": 310}
    assert save(4, params=300, learner=10) == {"weights/0-0.bin": 310}


def test_the_manifest_does_not_list_files_of_arrays(make, tmp_path, mesh):
    one = make(directory=tmp_path)
    one.save(1, state(1, mesh))
    one.wait()
    body = json.loads((tmp_path / "1" / "manifest.json").read_text())
    assert not [name for name in body["files"] if name.startswith(manifest.STATE)]
    assert len(body["index"]["pages"]) == 1
    assert body["format"] == 4
