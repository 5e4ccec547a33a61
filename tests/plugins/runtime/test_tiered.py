"""The local tier: restored bit for bit, and set aside if a hash is wrong or it cannot be trusted."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axlearn_core as ax
from axlearn_core.checkpoint import manifest
from axlearn_core.checkpoint.manifest import Checkpoints
from axlearn_core.errors import CheckpointError, RequestError
from axlearn_core.learn import AdamW
from axlearn_plugins_runtime.local_tier import LocalParts, Part
from axlearn_plugins_runtime.tiered import LocalTier, TieredCheckpointer
from support import api_runs

SETTINGS = {
    **api_runs.SMALL,
    "learner.optimizer": AdamW(learning_rate=0.01),
    "checkpointer.every_steps": 6,
    "log_every_steps": 1,
}


def train(run, tmp_path, *, steps, restore_step=None, **settings):
    return ax.train(
        "quickstart",
        with_={"local-tier": {"every": 2, "directory": str(tmp_path / "local")}},
        set={**SETTINGS, **settings},
        steps=steps,
        run_dir=run,
        restore_step=restore_step,
    )


def losses(run):
    return [(r["step"], r["loss"]) for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def local_steps(tmp_path):
    return sorted(int(p.name) for p in tmp_path.glob("local/*/process-0/[0-9]*"))


class Stopped(BaseException):
    """As a kill: nothing after it is saved."""


def stop_at(monkeypatch, step):
    """Ends a run in the middle of a step, without its last save."""
    from axlearn_core.train.session import Session

    real = Session.save

    def save(self, *, force=False):
        if self.step >= step:
            raise Stopped
        real(self, force=force)

    monkeypatch.setattr(Session, "save", save)


def interrupted(run, tmp_path, at):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, at)
        with pytest.raises(Stopped):
            train(run, tmp_path, steps=20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing happened to."""
    run = tmp_path_factory.mktemp("whole")
    ax.train("quickstart", set=SETTINGS, steps=14, run_dir=run / "run")
    return losses(run / "run")


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_local_state(whole, tmp_path, capsys):
    run = tmp_path / "run"
    interrupted(run, tmp_path, at=12)
    assert local_steps(tmp_path) == [4, 8, 10]  # two that are known to be whole, and the newest; step 6 is a checkpoint
    train(run, tmp_path, steps=14)
    assert "resuming from the checkpoint of step 10" in capsys.readouterr().err
    assert losses(run) == whole
    place = Checkpoints.from_directory(next(tmp_path.glob("local/*/process-0")))
    for step in place.steps():
        assert place.verify(step).step == step  # an ordinary checkpoint


@pytest.mark.slow
def test_a_flipped_bit_is_set_aside_and_the_next_state_taken(whole, tmp_path, capsys, caplog):
    run = tmp_path / "run"
    interrupted(run, tmp_path, at=12)
    data = next(tmp_path.glob("local/*/process-0/10/state/weights/0-0.bin"))
    whole_file = bytearray(data.read_bytes())
    whole_file[len(whole_file) // 2] ^= 1
    data.write_bytes(whole_file)
    train(run, tmp_path, steps=14)
    assert "resuming from the checkpoint of step 8" in capsys.readouterr().err
    assert "local state of step 10: " in caplog.text
    assert "got sha256" in caplog.text
    assert "set aside as " in caplog.text
    assert losses(run) == whole
    damaged = list(tmp_path.glob("local/*/process-0/.10.damaged-*/state/weights/0-0.bin"))
    assert [k.read_bytes() for k in damaged] == [bytes(whole_file)]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["manifest.json", "state/index/0.bin", "extra.json"])
def test_every_file_counts(damage, whole, tmp_path, capsys):
    run = tmp_path / "run"
    interrupted(run, tmp_path, at=12)
    for step in (8, 10):
        file = next(tmp_path.glob(f"local/*/process-0/{step}/{damage}"))
        file.write_bytes(file.read_bytes()[:-1] + b"~")
    train(run, tmp_path, steps=14)
    assert "resuming from the checkpoint of step 6" in capsys.readouterr().err
    assert losses(run) == whole


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_too(whole, tmp_path, capsys, caplog):
    run = tmp_path / "run"
    interrupted(run, tmp_path, at=13)
    for place in (tmp_path / "local").iterdir():
        place.rename(tmp_path / "gone")
    newest = run / "checkpoints/12/state/weights/0-0.bin"
    newest.write_bytes(newest.read_bytes()[:-1])
    train(run, tmp_path, steps=14)
    assert "resuming from the checkpoint of step 6" in capsys.readouterr().err
    assert "set aside as 12.damaged-" in caplog.text
    assert len(list((run / "checkpoints").glob("12.damaged-*/manifest.json"))) == 1
    assert losses(run) == whole


@pytest.mark.slow
def test_what_is_ahead_of_a_rollback_does_not_count(whole, tmp_path, capsys):
    run = tmp_path / "run"
    interrupted(run, tmp_path, at=12)
    train(run, tmp_path, steps=7, restore_step=6)
    capsys.readouterr()
    train(run, tmp_path, steps=14)
    assert "resuming from the checkpoint of step 7" in capsys.readouterr().err
    assert losses(run) == whole


@pytest.mark.slow
def test_a_step_that_is_not_finite_goes_back_once(whole, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    interrupted(run, tmp_path, at=12)
    from axlearn_core.compose import Program

    real, poisoned = Program.train_step, []

    def train_step(self, state, batch):
        if not poisoned:  # what was restored is not a number, though its hashes hold
            poisoned.append(True)
            bad = {p: jnp.full_like(x, jnp.nan) for p, x in state.params.items()}
            state = state.replace(params=jax.device_put(bad, {p: x.sharding for p, x in state.params.items()}))
        return real(self, state, batch)

    monkeypatch.setattr(Program, "train_step", train_step)
    train(run, tmp_path, steps=14)
    err = capsys.readouterr().err
    assert "resuming from the checkpoint of step 10" in err
    assert "rolling back to the checkpoint of step 6" in err
    assert losses(run) == whole
    assert local_steps(tmp_path)[0] > 6


@pytest.mark.slow
def test_a_run_without_the_feature_goes_on_from_checkpoints(whole, tmp_path, capsys):
    run = tmp_path / "run"
    interrupted(run, tmp_path, at=12)
    ax.train("quickstart", set=SETTINGS, steps=14, run_dir=run)
    assert "resuming from the checkpoint of step 6" in capsys.readouterr().err
    assert losses(run) == whole


def build(tmp_path, **local):
    local = {"directory": str(tmp_path / "local"), **local}
    return TieredCheckpointer.Config(local=LocalTier.Config(**local)).build(directory=tmp_path / "run")


def test_replicas_and_shards_are_restored_as_they_were(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split, copied = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    state = {
        "params": {
            "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), split),
            "b": jax.device_put(jnp.ones(3), copied),
        },
        "empty": jnp.zeros((0, 4)),
    }
    one = build(tmp_path, every_steps=1)
    one.save_local(1, state, extra={"data": 7}, metrics={})
    one.close()
    again = build(tmp_path, every_steps=1)
    got, extra, step = again.restore_newest(jax.tree.map(lambda x: x, state))
    assert (extra, step) == ({"data": 7}, 1)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert np.array_equal(a, b)
        assert a.sharding == b.sharding
    again.close()


def test_a_tier_that_cannot_be_written_does_not_stop_training(tmp_path, caplog):
    one = build(tmp_path, every_steps=1)
    assert one.parts.root.exists() is False
    one.parts.root.write_bytes(b"")  # a file where a folder belongs
    assert one.save_local(1, {"x": jnp.ones(3)}, extra={}, metrics={})
    assert one.save_local(2, {"x": jnp.ones(3)}, extra={}, metrics={})
    one.close()
    assert "cannot write the local tier" in caplog.text


def test_wrong_directories_are_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    for directory, reason in (
        (f"{tmp_path}/open", "others may write to"),
        ("$NO_SUCH_VARIABLE/x", "a variable in"),
        ("s3://bucket/x", "is a URI"),
        (f"{tmp_path}/file/x", "Not a directory"),
    ):
        with pytest.raises(RequestError, match=rf"(?s)checkpointer.local.directory: .*{reason}.*fix: "):
            build(tmp_path, directory=directory)
    os.environ["A_DIRECTORY"] = str(tmp_path)
    build(tmp_path, directory="$A_DIRECTORY/mine").close()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def test_another_checkpointer_is_refused():
    other = ax.patch(ax.resolve("quickstart").config, {"checkpointer": LocalTier.Config()})
    with pytest.raises(RequestError, match="local-tier requires the core's checkpointer"):
        ax.resolve(other, with_=["local-tier"])


def test_damaged_extra_data_of_a_part_is_not_read(tmp_path, monkeypatch):
    parts = LocalParts(str(tmp_path / "tier"), "run")
    part = Part(3, "attempt", 0, "timeline")
    files = {manifest.EXTRA: manifest.describe(b'{"position": 1}')}
    monkeypatch.setattr(parts, "inspect", lambda part: manifest.Manifest(3, {}, {}, files))
    file = parts.root / part.folder / manifest.EXTRA
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{"position": 1}')
    assert parts.read_extra(part) == {"position": 1}
    file.write_bytes(b'{"position": 2}')
    with pytest.raises(CheckpointError, match="is damaged: its hash does not match"):
        parts.read_extra(part)
