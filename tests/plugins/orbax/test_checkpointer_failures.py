"""A save that fails or takes too long: every process hears of it at once, and the next one works."""

import asyncio
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from orbax.checkpoint.experimental.v1._src.handlers.pytree_handler import PyTreeHandler

from axlearn_core.errors import WorkError
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer

STATE = {"params": {"w": jnp.arange(6.0)}, "step": jnp.asarray(1)}


def test_a_save_beyond_its_time_fails_and_can_be_tried_again(tmp_path, monkeypatch):
    write, pause = PyTreeHandler._background_save, [1.2]

    async def write_late(self, *args, **fields):
        await asyncio.sleep(pause[0])
        await write(self, *args, **fields)

    monkeypatch.setattr(PyTreeHandler, "_background_save", write_late)
    one = OrbaxCheckpointer.Config(timeout_seconds=1).build(directory=tmp_path)
    one.save(1, STATE)
    with pytest.raises(WorkError, match=r"took longer than 1 s \(checkpointer.timeout_seconds\): Overall save timeout"):
        one.wait()
    assert one.steps() == []
    pause[0] = 0.0
    assert one.save(1, STATE)
    one.wait()
    assert (one.restore(1, jax.eval_shape(lambda: STATE))[0]["params"]["w"] == jnp.arange(6)).all()
    one.close()


WORKER = """
import asyncio, os, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
address, index, directory, failing = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, index)
from orbax.checkpoint.experimental.v1._src.handlers.pytree_handler import PyTreeHandler
from axlearn_core.errors import WorkError
from axlearn_plugins_orbax.checkpointer import OrbaxCheckpointer

split = NamedSharding(jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)), P("fsdp"))
make = lambda value: {"params": {"x": jax.jit(lambda: jnp.arange(8.0) + value, out_shardings=split)()}}
one = OrbaxCheckpointer.Config(timeout_seconds=15).build(directory=directory)
one.run = "ours"
assert one.save(1, make(1))
one.wait()
write = PyTreeHandler._background_save
async def full(self, directory, *, commit_futures, **fields):
    for future in commit_futures:
        await asyncio.to_thread(future.result)
    raise OSError(28, "No space left on device")
def fail(step):
    if index == failing:
        PyTreeHandler._background_save = full
    assert one.save(step, make(step))
    try:
        one.wait()
        raise SystemExit("no error")
    except WorkError as error:
        print(error, flush=True)
    PyTreeHandler._background_save = write
def save(step):
    assert one.save(step, make(step))
    one.wait()
fail(2)
save(3)  # while Orbax waits in the save of step 2
fail(4)
save(4)  # once Orbax has given up the first try
assert one.steps() == [1, 3, 4], one.steps()
for step in (3, 4):
    got, _ = one.restore(step, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(0)))
    for shard in got["params"]["x"].addressable_shards:
        assert (shard.data == (jnp.arange(8.0) + step)[shard.index]).all()
print("done", flush=True)
if index == 0:
    sys.stdin.read()  # the process that coordinates them goes last
os._exit(0)  # the thread that Orbax waits in ends with its limit
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_all_processes_hear_of_a_failure_while_orbax_waits(failing, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", WORKER, address]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["XLA_FLAGS_OF_ONE_DEVICE"]}
    workers = [
        subprocess.Popen(
            [*command, str(i), str(tmp_path / "checkpoints"), str(failing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
    ]
    try:
        for i, worker in reversed(list(enumerate(workers))):
            out, err = worker.communicate(timeout=240)
            assert worker.returncode == 0, err[-3000:]
            expected = "" if i == failing else f"process {failing}: [Errno 28] "
            assert f"/checkpoints: {expected}No space left on device" in out
            assert out.endswith("done\n")
    finally:
        for worker in workers:
            worker.kill()
            for pipe in (worker.stdin, worker.stdout, worker.stderr):
                pipe.close()
