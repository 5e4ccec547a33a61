"""A bit that a device flips is found, and named by process, device and array."""

import functools
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axlearn_core as ax
from axlearn_core.compose import Program
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.train.trainer import Trainer
from axlearn_plugins_runtime.corruption import checksums, compare_replicas
from support import api_runs
from support.api_runs import losses

train = functools.partial(api_runs.train, steps=6, **api_runs.REPLICAS)


def flip(array, device):
    """The array with one bit of one device's copy flipped."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.view(np.uint32).reshape(-1)[3] ^= 1 << 5
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def plant(monkeypatch, call):
    """Flips a bit of a replicated parameter in the result of one call of the step, on the sixth device."""
    real, calls, leaves = Program.train_step, [], []

    def train_step(self, state, batch):
        state, scalars = real(self, state, batch)
        calls.append(None)
        if len(calls) == call:
            path = next(p for p, x in state.params.items() if x.sharding.is_fully_replicated and x.size > 4)
            leaves.append(path)
            state = state.replace(params={**state.params, path: flip(state.params[path], jax.devices()[5])})
        return state, scalars

    monkeypatch.setattr(Program, "train_step", train_step)
    return leaves


@pytest.mark.slow
def test_training_is_unchanged(tmp_path):
    train(tmp_path / "plain")
    train(tmp_path / "checked", "sdc-check:every_steps=2")
    assert losses(tmp_path / "plain") == losses(tmp_path / "checked")
    train(
        tmp_path / "plain", "sdc-check:every_steps=2", steps=8
    )  # execution only: a run may begin or end to be checked


@pytest.mark.slow
def test_a_flip_that_comes_once_is_found_by_computing_twice(tmp_path, monkeypatch):
    leaves = plant(monkeypatch, call=4)  # the first computation of step 4
    with pytest.raises(WorkError) as error:
        train(tmp_path / "run", "sdc-check:every_steps=4,replicas=false")
    text = str(error.value)
    assert "step 4 was computed incorrectly: silent data corruption" in text
    assert (
        f"process 0 on {socket.gethostname()}: device {jax.devices()[5]}: params.{leaves[0]} differed in the second run"
        in text
    )
    assert text.count("device ") == 1  # no other device is accused
    assert error.value.exit_code == 1


@pytest.mark.slow
def test_a_flip_that_stays_is_found_among_the_replicas(tmp_path, monkeypatch):
    leaves = plant(monkeypatch, call=2)  # two steps before the check
    with pytest.raises(WorkError) as error:
        train(tmp_path / "run", "sdc-check:every_steps=4,rerun=false")
    text = str(error.value)
    assert f"process 0 on {socket.gethostname()}: device {jax.devices()[5]}: params.{leaves[0]}" in text
    assert "differs from its replicas" in text


@pytest.mark.slow
def test_every_bit_counts():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    dice = np.random.default_rng(0)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.uint32, jnp.bool_):
        value = jnp.asarray(dice.integers(0, 2, (16, 3)), dtype)
        plain = {"x": jax.device_put(value, NamedSharding(mesh, P("data")))}
        before = checksums(plain)
        assert before == checksums(plain)
        assert len(before) == 8
        for bit in range(8 * value.dtype.itemsize if dtype != jnp.bool_ else 1):
            raw = np.array(value)
            raw.view(np.uint8).reshape(-1)[7 * raw.dtype.itemsize + bit // 8] ^= 1 << (bit % 8)
            after = checksums({"x": jax.device_put(jnp.asarray(raw), NamedSharding(mesh, P("data")))})
            assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [1], (dtype, bit)


def test_most_replicas_decide():
    rows = [(p, f"host{p}", [["w", "", "d0", 7 if p == 2 else 5], ["b", "0:4", "d0", p]]) for p in range(3)]
    assert compare_replicas(rows) == [
        "process 2 on host2: device d0: w differs from its replicas",
        *(f"process {p} on host{p}: device d0: b[0:4] differs from its replicas (no majority)" for p in range(3)),
    ]


def test_another_loop_is_refused():
    from axlearn_plugins_runtime.watchdog import RuleWatchdog

    config = ax.resolve("quickstart").config
    assert isinstance(config, Trainer.Config)
    other = ax.patch(config, {"loop": RuleWatchdog.Config()})
    with pytest.raises(RequestError, match="sdc-check requires the core's training loop"):
        ax.resolve(other, with_=["sdc-check"])
