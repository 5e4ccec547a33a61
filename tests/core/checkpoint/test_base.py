import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axlearn_core.checkpoint import manifest
from axlearn_core.errors import CheckpointError, WorkError


def bits(tree):
    """Every leaf as bytes, with its dtype."""
    values = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    return jax.tree.map(lambda x: (str(x.dtype), x.shape, np.asarray(x).tobytes()), values)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.mark.fast_cases("orbax")
def test_state_and_extra_come_back_bit_for_bit(make, state):
    writer = make()
    writer.files = {"config.yaml": "a: 1\n", "run.lock.json": lambda: "{}"}
    assert writer.save(5, state, extra={"data": {"position": [1, 2]}}, metrics={"loss": 1.5})
    writer.wait()
    reader = make()
    assert reader.latest_step() == 5
    got, extra = reader.restore(5, abstract(state))
    assert bits(got) == bits(state)
    assert extra == {"data": {"position": [1, 2]}}
    assert jax.tree.map(lambda x: x.sharding, got["params"]) == jax.tree.map(lambda x: x.sharding, state["params"])
    assert jax.random.normal(got["rng"][0]) == jax.random.normal(state["rng"][0])
    assert (reader.directory / "5" / "config.yaml").read_text() == "a: 1\n"
    assert (reader.directory / "5" / "run.lock.json").read_text() == "{}"


@pytest.mark.slow_cases("sharded-bool", "sharded-float16")
@pytest.mark.parametrize(
    "dtype",
    ["bool", "int4", "uint8", "int32", "uint32", "float16", "bfloat16", "float8_e4m3fn", "float32", "complex64"],
)
def test_every_dtype_comes_back_bit_for_bit(make, dtype):
    raw = jax.random.randint(jax.random.key(0), (3, 5), 0, 7)
    special = jnp.array([jnp.nan, -jnp.inf, -0.0]) if jnp.issubdtype(dtype, jnp.floating) else jnp.zeros((3,))
    tree = {"x": raw.astype(dtype), "special": special.astype(dtype), "scalar": jnp.asarray(1).astype(dtype)}
    one = make()
    one.save(1, tree)
    one.wait()
    got, _ = one.restore(1, tree)
    assert bits(got) == bits(tree)


def test_a_checkpoint_can_be_read_onto_another_layout(make, state, mesh):
    one = make()
    one.save(1, state)
    one.wait()
    like = {
        "decoder.up.weight": jax.ShapeDtypeStruct((16, 4), jnp.float32),  # says nothing of where: one device
        "decoder.norm.scale": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("fsdp"))),
    }
    got, _ = one.restore(1, {**abstract(state), "params": like})
    assert bits(got) == bits(state)
    assert got["params"]["decoder.norm.scale"].sharding.spec == P("fsdp")
    assert len(got["params"]["decoder.up.weight"].sharding.device_set) == 1


def test_saving_returns_before_the_checkpoint_is_there(make, state, monkeypatch):
    go_on, real = threading.Event(), manifest.render
    monkeypatch.setattr(manifest, "render", lambda *a, **k: go_on.wait(30) and real(*a, **k))
    one = make()
    one.save(1, state)
    assert one.steps() == []
    go_on.set()
    one.wait()
    assert one.steps() == [1]


@pytest.mark.fast_cases("sharded")
def test_the_state_may_be_donated_as_soon_as_save_returns(make):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    one, value = make(keep_last=None), {"x": jnp.zeros((256, 1024))}
    for i in range(1, 7):
        value = {"x": step(value["x"])}
        one.save(i, value)
        for _ in range(3):
            value = {"x": step(value["x"])}
    one.wait()
    for i in range(1, 7):
        got, _ = one.restore(i, value)
        assert (got["x"] == 4 * i - 3).all()


def test_one_error_lists_every_array_that_does_not_fit(make, state):
    one = make()
    one.save(1, state)
    one.wait()
    like = abstract(state)
    like["params"]["decoder.up.bias"] = like["params"].pop("decoder.norm.scale")
    like["params"]["decoder.up.weight"] = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    like["step"] = jax.ShapeDtypeStruct((), jnp.float32)
    with pytest.raises(CheckpointError) as error:
        one.restore(1, like)
    text = str(error.value)
    assert "missing: params.decoder.up.bias float32[8]" in text
    assert "unexpected: params.decoder.norm.scale float32[8]" in text
    assert "differs: params.decoder.up.weight: the checkpoint has float32[16,4], expected float32[16,8]" in text
    assert "differs: step: the checkpoint has int32[], expected float32[]" in text
    assert error.value.exit_code == 2


def newest(one, pattern: str) -> Path:
    return max((one.directory / "20").glob(pattern), key=lambda p: p.stat().st_size if p.is_file() else 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow_cases(
    "orbax-<lambda>-extra\\\\.json: got sha256",
    "orbax-<lambda>-manifest\\\\.json: No such file",
    "orbax-<lambda>-manifest\\\\.json: is damaged0",
    "orbax-<lambda>-manifest\\\\.json: is damaged2",
    "orbax-<lambda>-state/.*(is too short|got 1 bytes, expected \\\\d+)",
    "orbax-<lambda>-state/.*: No such file",
)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda one: flip(newest(one, "state/**/*")), r"state/.*: got sha256 \w+, expected \w+"),
        (
            lambda one: newest(one, "state/**/*").write_bytes(b"x"),
            r"state/.*(is too short|got 1 bytes, expected \d+)",
        ),
        (lambda one: newest(one, "state/**/*").unlink(), r"state/.*: No such file"),
        (lambda one: flip(newest(one, "extra.json")), r"extra\.json: got sha256"),
        (lambda one: newest(one, "manifest.json").unlink(), r"manifest\.json: No such file"),
        (lambda one: newest(one, "manifest.json").write_text("{}"), r"manifest\.json: is damaged"),
        (
            lambda one: newest(one, "manifest.json").write_text(newest(one, "manifest.json").read_text()[:-40]),
            r"manifest\.json: is damaged",
        ),
        (
            lambda one: newest(one, "manifest.json").write_text(
                newest(one, "manifest.json").read_text().replace('"loss": 1.5', '"loss": 0.5')
            ),
            r"manifest\.json: is damaged",
        ),
    ],
)
def test_damage_is_found_before_reading_and_named(make, state, damage, reason):
    one = make()
    for step in (10, 20):
        one.save(step, state, extra={"position": 12345}, metrics={"loss": 1.5})
    one.wait()
    damage(one)
    with pytest.raises(CheckpointError, match=rf"step 20 in [^$]*damaged\n    {reason}[^$]*--restore-step 10"):
        make().restore(20, abstract(state))
    assert make().latest_step() == 20  # never passed over in silence
    got, _ = make().restore(10, abstract(state))
    assert bits(got) == bits(state)


def test_a_step_that_is_not_there_is_named(make, state):
    one = make()
    one.save(10, state)
    one.wait()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 11[^$]*steps: 10"):
        one.restore(11, abstract(state))


def test_going_back_sets_the_later_checkpoints_aside(make, state, caplog):
    one = make()
    for step in (10, 20, 30):
        one.save(step, state)
    one.wait()
    back = make()
    back.restore(10, abstract(state))
    assert back.steps() == [10, 20, 30]  # looking changes nothing
    back.save(15, state)
    back.wait()
    assert back.steps() == [10, 15]
    assert len(list(back.directory.glob("[23]0.superseded-*"))) == 2
    assert "renamed the checkpoint of step 30 to" in caplog.text


def test_only_what_the_run_wrote_is_deleted(make, tmp_path):
    """Another run's checkpoint, a directory of the user's and one without an owner stay, regardless of their names."""
    for step, run in ((1, "theirs"), (2, ""), (3, "ours"), (4, "ours")):
        one = make(keep_last=None)
        one.run = run
        one.save(step, {"x": jnp.ones(2)})
        one.wait()
    notes = one.directory / "2024"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    one = make(keep_last=1)
    one.run = "ours"
    one.save(5, {"x": jnp.ones(2)})
    one.wait()
    assert one.steps() == [1, 2, 5]
    assert [one.inspect(s).run for s in one.steps()] == ["theirs", "", "ours"]
    assert (notes / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["sharded"])
@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_host_memory_is_bounded(make, state, limit):
    one = make(max_host_bytes=limit)
    peak, real = 0, one._buffers.take

    def take(size, **fields):
        nonlocal peak
        buffer = real(size, **fields)
        peak = max(peak, one._buffers.used_bytes)
        return buffer

    one._buffers.take = take
    one.save(1, state)
    one.wait()
    largest = 128
    assert 0 < peak <= max(limit, largest)
    assert one._buffers.used_bytes == 0
    assert bits(one.restore(1, abstract(state))[0]) == bits(state)


def test_failed_saves_are_warnings_until_there_are_too_many(make, monkeypatch, caplog):
    one, real = make(max_failed_saves=2), manifest.render
    results = []
    one.on_result = lambda step, reason: results.append((step, reason))

    def fail(error):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "render", fail)
    for step in (1, 2, 3):
        assert one.save(step, {"x": jnp.ones(2)})
    assert caplog.text.count("training continues: consecutive failure") == 2
    with pytest.raises(WorkError, match=r"step 3 could not be written[^$]*No space left"):
        one.save(4, {"x": jnp.ones(2)})
    monkeypatch.setattr(manifest, "render", real)
    assert one.save(5, {"x": jnp.ones(2)})
    one.wait()
    assert one.steps() == [5]
    monkeypatch.setattr(manifest, "render", fail)
    for step in (6, 7, 8):  # a save that works begins the count anew
        assert one.save(step, {"x": jnp.ones(2)})
    with pytest.raises(WorkError):
        one.wait()  # nor is the last failure of a run passed over
    failed = "No space left on device"
    assert results == [(1, failed), (2, failed), (3, failed), (5, None), (6, failed), (7, failed), (8, failed)]


@pytest.mark.slow_cases("orbax-fields2-steps2", "orbax-fields3-steps3", "orbax-fields4-steps4")
@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep_last": 1, "keep_best": 2}, [3, 4, 6]),
        ({"keep_last": 1, "keep_best": 1, "best_mode": "max", "best_metric": "accuracy"}, [2, 6]),
    ],
)
def test_what_is_kept(make, fields, steps):
    one = make(**fields)
    for step, loss, accuracy in zip(
        range(1, 7), (0.9, 0.8, 0.1, 0.2, 0.5, 0.6), (0.1, 0.9, 0.2, 0.3, 0.4, 0.5), strict=True
    ):
        metrics = {"eval_loss": loss, "accuracy": accuracy} if step > 1 else {}
        one.save(step, {"x": jnp.ones((2,))}, metrics=metrics)
    one.wait()
    assert one.steps() == steps
    assert sorted(p.name for p in one.directory.iterdir()) == [str(s) for s in steps]


def test_a_metric_that_no_checkpoint_has_is_reported(make, caplog):
    one = make(keep_last=1, keep_best=1, best_metric="evalloss")
    one.save(1, {"x": jnp.ones((2,))}, metrics={"eval_loss": 1.0})
    one.wait()
    assert "no checkpoint has the metric 'evalloss'" in caplog.text


def test_due_and_repeated_saves(make, state):
    one = make(every_steps=5)
    assert [s for s in range(16) if one.due(s)] == [5, 10, 15]
    assert one.save(5, state)
    assert not one.save(5, state)
    assert one.steps() == [5]


@pytest.mark.parametrize(
    ("leaf", "reason"), [(3.5, "float 3.5"), (np.arange(3), "ndarray int64"), ("text", "str 'text'")]
)
def test_what_jax_would_change_is_refused_rather_than_saved(make, leaf, reason):
    with pytest.raises(CheckpointError, match=f"a.b: cannot save {reason}"):
        make().save(1, {"a": {"b": leaf}})


def test_extra_that_is_no_json_is_refused_at_once(make, state):
    with pytest.raises(TypeError, match="JSON"):
        make().save(1, state, extra={"x": object()})


def test_a_manifest_tells_what_is_in_a_checkpoint(make, state):
    one = make()
    one.save(7, state, metrics={"eval_loss": 2.5})
    one.wait()
    manifest = one.inspect(7)
    assert (manifest.step, manifest.metrics) == (7, {"eval_loss": 2.5})
    assert {p: str(a) for p, a in manifest.arrays.items()} == {
        "step": "int32[]",
        "rng": "key<fry>[3]",
        "params.decoder.norm.scale": "float32[8]",
        "params.decoder.up.weight": "float32[16,4]",
        "learner.0": "bfloat16[16,4]",
        "learner.1": "float32[0,4]",
    }
    files = [p for p in (one.directory / "7").rglob("*") if p.is_file() and p.name != "manifest.json"]
    names = {p.relative_to(one.directory / "7").as_posix() for p in files}
    if manifest.index is None:
        assert set(manifest.files) == names
    else:  # one small file has all arrays
        assert names - set(manifest.files) == {"state/weights/0-0.bin", "state/index/0.bin"}
    assert manifest.num_files == len(files)
    assert manifest.bytes == sum(p.stat().st_size for p in files)
    assert json.loads((one.directory / "7" / "extra.json").read_text()) == {}


def test_an_unwritable_directory_is_a_work_error(make, state, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match=r"step 1 could not be written[^$]*Not a directory[^$]*intact: none") as error:
        make(directory=tmp_path / "file" / "checkpoints", max_failed_saves=0).save(1, state)
    assert error.value.exit_code == 1
