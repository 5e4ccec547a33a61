"""The local tier over several processes, each with a directory of its own, as machines have."""

import os
import socket
import subprocess
import sys

import pytest

PROLOGUE = """
import logging, os, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
address, index, count, root = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
host = sys.argv[5 + index]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, index)
from axlearn_plugins_runtime.tiered import LocalTier, TieredCheckpointer
from axlearn_core.errors import WorkError
logging.basicConfig(level=logging.INFO)
logging.getLogger("jax").setLevel(logging.WARNING)
mesh = jax.make_mesh(AXES, ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
split, copied = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
put = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i])
def make(value):
    w = np.arange(96.0, dtype=np.float32).reshape(12, 8)
    return {"params": {"w": put(w + value, split), "b": put(np.full(5, value, np.int32), copied)}}
def build(**local):
    local = {"directory": str(root / host), "every_steps": 1, "wait_seconds": 60.0, **local}
    one = TieredCheckpointer.Config(local=LocalTier.Config(**local)).build(directory=root / "run")
    one.run = "ours"
    return one
def check(got, value):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(make(value)), strict=True):
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            assert np.array_equal(x.data, y.data), (x.data, y.data)
"""
SAVE = """
one = build(**LOCAL)
for step in (1, 2, 3, 4):
    one.save_local(step, make(step), extra={"data": step}, metrics={})
one._finish_saves(wait=True)
one.close()
print("done", index)
"""
RESTORE = """
one = build(**LOCAL)
found = one.restore_newest(make(0))
if found is None:
    print("done", index, None)
else:
    check(found[0], found[2])
    assert found[1] == {"data": found[2]}
    print("done", index, found[2])
one.close()
"""
LATE = """
one = build(wait_seconds=2.0)
one.parts
if index == 1:
    import time
    time.sleep(60)
try:
    one.restore_newest(make(0))
except WorkError as error:
    print("done", index, str(error).splitlines()[0], flush=True)
    os._exit(0)
"""


def run(script, root, hosts, *, axes=(4, 1), local="{}", devices=2, ends=None):
    """Runs a script in as many processes as there are hosts; their outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONWARNINGS": "ignore",
    }
    code = (PROLOGUE + script).replace("AXES", repr(axes)).replace("**LOCAL", f"**{local}")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(i), str(len(hosts)), str(root), *hosts],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(len(hosts))
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in list(zip(processes, outputs, strict=True))[:ends]:
        assert process.returncode == 0, err[-4000:]
        assert "done" in out, (out, err[-2000:])
    return outputs


@pytest.mark.slow
def test_a_spare_machine_gets_the_replica_of_another(tmp_path):
    run(SAVE, tmp_path, ["a", "b"])
    outputs = run(RESTORE, tmp_path, ["a", "spare"])
    assert [out.split()[-1] for out, _ in outputs] == ["4", "4"]
    assert "process 1 received " in outputs[1][1]
    assert "got " not in outputs[0][1]
    outputs = run(RESTORE, tmp_path, ["spare", "b"])  # in the place of the first process, too
    assert [out.split()[-1] for out, _ in outputs] == ["4", "4"]


@pytest.mark.slow
def test_a_damaged_part_comes_from_the_other_machine(tmp_path):
    run(SAVE, tmp_path, ["a", "b"])
    data = next(tmp_path.glob("b/ours/process-1/4/state/weights/*.bin"))
    data.write_bytes(data.read_bytes()[:-1] + b"~")
    outputs = run(RESTORE, tmp_path, ["a", "b"])
    assert [out.split()[-1] for out, _ in outputs] == ["4", "4"]
    assert "set aside as" in outputs[1][1]
    assert len(list(tmp_path.glob("b/ours/process-1/.4.damaged-*"))) == 1


@pytest.mark.slow
def test_shards_that_nobody_else_holds_need_copies(tmp_path):
    run(SAVE, tmp_path / "alone", ["a", "b"], axes=(1, 4))
    assert [o.split()[-1] for o, _ in run(RESTORE, tmp_path / "alone", ["a", "b"], axes=(1, 4))] == ["4", "4"]
    assert [o.split()[-1] for o, _ in run(RESTORE, tmp_path / "alone", ["a", "spare"], axes=(1, 4))] == ["None"] * 2
    run(SAVE, tmp_path / "copied", ["a", "b", "c"], axes=(1, 6), local="{'copies': 1}")
    outputs = run(RESTORE, tmp_path / "copied", ["a", "spare", "c"], axes=(1, 6), local="{'copies': 1}")
    assert [out.split()[-1] for out, _ in outputs] == ["4"] * 3
    # A machine less: other shards, from the same parts.
    outputs = run(RESTORE, tmp_path / "copied", ["a", "c"], axes=(1, 4), local="{'copies': 1}")
    assert [out.split()[-1] for out, _ in outputs] == ["4"] * 2


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(tmp_path):
    outputs = run(LATE, tmp_path, ["a", "b"], ends=1)  # the job ends with its first process
    assert "restore: waited 2 s for process 1" in outputs[0][0]
