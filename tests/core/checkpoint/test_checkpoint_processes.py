"""Several processes write one checkpoint, and agree on what went wrong."""

import os
import socket
import subprocess
import sys

import pytest

WORKER = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
address, index, directory, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, index)
from axlearn_core.checkpoint import ShardedCheckpointer, manifest
from axlearn_core.plugins.registry import registry
from axlearn_core.errors import CheckpointError, WorkError

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
split = NamedSharding(mesh, P("fsdp"))
make = lambda value: {"x": jax.jit(lambda: jnp.arange(64.0).reshape(8, 8) + value, out_shardings=split)()}
one = registry().component(kind)(keep_last=2).build(directory=directory)
for step in (1, 2, 3):
    assert one.save(step, make(step), extra={"step": step})
one.wait()
assert one.steps() == [2, 3], one.steps()
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(0))
got, extra = one.restore(3, like)
assert extra == {"step": 3}
for shard in got["x"].addressable_shards:
    assert (shard.data == (jnp.arange(64.0).reshape(8, 8) + 3)[shard.index]).all()

# Of an array that each process holds alone, there is one copy in the checkpoint.
alone = registry().component(kind)().build(directory=directory + "-alone")
alone.save(1, {**make(7), "count": jnp.arange(3)})
alone.wait()
held = {**like, "count": jax.ShapeDtypeStruct((3,), jnp.int32, sharding=NamedSharding(mesh, P()))}
got, _ = alone.restore(1, held)
assert (np.asarray(got["count"].addressable_data(0)) == np.arange(3)).all()
alone.close()

if kind == "sharded":
    # What both processes hold is read once in the job: a half by each.
    from axlearn_core.checkpoint import LocalStorage
    copied = NamedSharding(jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2), P(None, "fsdp"))
    y = jax.make_array_from_callback((8, 1024), copied, lambda i: np.arange(8 * 1024.0, dtype=np.float32).reshape(8, 1024)[i])
    import functools
    from axlearn_core.checkpoint import writer
    writer.split_shape = functools.partial(writer.split_shape, limit=2048)  # pieces of 16 MiB are for larger arrays
    two = ShardedCheckpointer.Config().build(directory=directory + "-copied")
    two.save(1, {"y": y})
    two.wait()
    counts, real_read = [], LocalStorage.read_into
    def counted(self, path, begin, buffer):
        counts.append(len(buffer) if "/index/" not in path else 0)
        real_read(self, path, begin, buffer)
    LocalStorage.read_into = counted
    got, _ = two.restore(1, {"y": jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=copied)})
    LocalStorage.read_into = real_read
    assert got["y"].sharding.is_equivalent_to(copied, 2)
    for shard in got["y"].addressable_shards:
        assert (np.asarray(shard.data) == np.arange(8 * 1024.0).reshape(8, 1024)[shard.index]).all()
    print("read", sum(counts))
    two.close()

# The first process cannot commit: both hear of it, and both can go on.
real = manifest.render
def full(*args, **kwargs):
    raise OSError(28, "No space left on device")
manifest.render = full
one.save(4, make(4))
try:
    one.wait()
    raise SystemExit("no error")
except WorkError as error:
    expected = "No space left on device" if index == 0 else "failed on process 0"
    assert expected in str(error), error
manifest.render = real
assert one.save(5, make(5))
one.wait()

# Only the first process verifies: both refuse.
jax.experimental.multihost_utils.sync_global_devices("saved")
if index == 0:
    (one.directory / "5" / "extra.json").write_text("{} ")
jax.experimental.multihost_utils.sync_global_devices("damaged")
try:
    one.restore(5, like)
    raise SystemExit("no error")
except (CheckpointError, WorkError) as error:
    assert "extra.json" in str(error) or "a checkpoint failed on process" in str(error), error
    print("found", "extra.json" in str(error))
one.close()
print("done", index)
"""


@pytest.mark.slow
def test_two_processes_save_restore_and_fail_together(kind, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(i), str(tmp_path / "checkpoints"), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
    ]
    outputs = []
    try:
        for i, worker in enumerate(workers):
            out, err = worker.communicate(timeout=240)
            assert worker.returncode == 0, err[-3000:]
            assert f"done {i}" in out
            outputs.append(out)
            assert kind == "orbax" or "read 16384" in out  # half of 32 KiB
        assert sum("found True" in out for out in outputs) == 1  # one process compared the file, both refused
    finally:
        for worker in workers:
            worker.kill()
