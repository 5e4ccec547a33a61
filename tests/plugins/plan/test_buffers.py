"""Memory from the compiler's buffer assignment, compared with libtpu's out-of-memory errors."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axlearn_core.contracts.target import Machine, Target
from axlearn_core.plugins.resolve import resolve
from axlearn_plugins_plan import buffers, compilation, render
from axlearn_plugins_plan.memory import Memory, compiled_memory, parse_out_of_memory, shard_bytes
from axlearn_plugins_plan.plan import make_plan
from support.needs import require

GIB = 2**30


def machine(platform):
    target = Target(name="chip", platform=platform, hbm_bytes=95.74 * GIB)
    return Machine(name="chip-1", target=target, chips=1, domains=1, chips_per_host=1)


TPU = machine("tpu")
TEXT = """BufferAssignment:
allocation 0: size 0, thread-local:
 value: <197 after-all.5 @0> (size=0,offset=0): token[]
allocation 1: size 4096, parameter 37, shape |f32[32,32]| at ShapeIndex {}, maybe-live-out:
 value: <4608 param.58 @0> (size=4096,offset=0): f32[32,32]{1,0:T(8,128)}
allocation 2: size 1024, color 5, parameter 8, shape |f32[16,16]| at ShapeIndex {}, maybe-live-out:
allocation 3: size 512, constant:
allocation 4: size 128, color 1, preallocated-temp:
allocation 5: size 8192, preallocated-temp:
 value: <3364 allocation 7: size 99 @0> (size=2048,offset=6144): bf16[64]{0}
allocation 6: size 256, color 0, output shape is |(f32[64])|, maybe-live-out:
"""
"""As libtpu 0.0.42 writes it, shortened: colors 1 and 5 are memory on the chip and the host's."""


def test_only_the_main_memory_counts():
    assert buffers.parse_buffers(TEXT) == buffers.Buffers(arguments=4096, temporaries=512 + 8192 + 256)
    assert buffers.parse_buffers("BufferAssignment:\n") is None


def test_what_was_written_since_is_read(tmp_path):
    files = [tmp_path / f"module_{i}.after_optimizations-buffer-assignment.txt" for i in range(3)]
    files[0].write_text("allocation 0: size 1, preallocated-temp:\n")
    with buffers.open_dump({"xla_dump_to": str(tmp_path)}) as dump:
        assert not dump.options, "the dump is already enabled"
        assert dump.read() is None, "earlier files belong to another program"
        files[1].write_text("allocation 0: size 2, preallocated-temp:\n")
        files[2].write_text("allocation 0: size 3, preallocated-temp:\n")
        os.utime(files[2], (1, 1))
        values = tmp_path / "module_1.after_optimizations-buffer-assignment-values.txt"
        values.write_text("allocation 0: size 4, preallocated-temp:\n")
        assert dump.read() == buffers.Buffers(arguments=0, temporaries=2)
    assert files[1].exists(), "the directory is the user's"


def test_a_directory_of_xla_flags_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_hlo_as_text --xla_dump_to={tmp_path} --xla_dump_max_hlo_modules=1")
    with buffers.open_dump({}) as dump:
        assert (dump.directory, dump.options) == (tmp_path, {})


def test_nothing_is_left_of_a_dump_of_our_own(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with buffers.open_dump({}) as dump:
        assert dump.directory.is_dir()
        assert dump.options == {"xla_dump_to": str(dump.directory)}
    assert not dump.directory.exists()


def test_statistics_of_a_program_for_tpus_are_an_upper_bound():
    stats = SimpleNamespace(
        argument_size_in_bytes=16 * GIB, temp_size_in_bytes=105 * GIB, output_size_in_bytes=16 * GIB,
        alias_size_in_bytes=16 * GIB, generated_code_size_in_bytes=0,
    )  # fmt: skip
    compiled = SimpleNamespace(memory_analysis=lambda: stats)
    statistics = compiled_memory(compiled, TPU)
    assert (statistics.total, statistics.is_upper_bound, statistics.fits) == (121 * GIB, True, True)
    exact = compiled_memory(compiled, TPU, buffers.Buffers(arguments=16 * GIB, temporaries=79 * GIB))
    assert (exact.total, exact.is_upper_bound, exact.fits) == (95 * GIB, False, True)
    of_another_program = compiled_memory(compiled, TPU, buffers.Buffers(arguments=10 * GIB, temporaries=GIB))
    assert (of_another_program.total, of_another_program.is_upper_bound) == (121 * GIB, True)
    on_gpu = compiled_memory(compiled, machine("gpu"))
    assert (on_gpu.is_upper_bound, on_gpu.fits) == (False, False)


def test_a_refusal_counts_arguments_once():
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (163.64G) "
        "exceeds available HBM (95.74G)."
    )
    by_message = parse_out_of_memory(message, 16 * GIB, TPU)
    assert by_message is not None
    assert by_message.total == pytest.approx(163.64 * GIB)
    read = parse_out_of_memory(message, 16 * GIB, TPU, buffers.Buffers(arguments=16 * GIB, temporaries=147 * GIB))
    assert read is not None
    assert (read.total, read.out_of_memory, read.fits) == (163 * GIB, True, False)
    assert (
        parse_out_of_memory("INTERNAL: a kernel does not compile", 0, TPU, buffers.Buffers(arguments=1, temporaries=1))
        is None
    )


def test_what_is_in_the_host_memory_is_not_the_device_s():
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    kinds = ("device", "pinned_host", "device")
    tree = [
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(), memory_kind=kind))
        for kind in kinds
    ]
    assert shard_bytes(tree) == 2 * 8 * 4 * 4


def test_an_upper_bound_says_so():
    memory = Memory(
        arguments=2 * GIB, temporaries=3 * GIB, capacity=4 * GIB, is_upper_bound=True, compiler_checks_memory=True
    )
    lines = [*render._memory(SimpleNamespace(memory=memory, largest_batch=None))]
    assert lines[0] == "fits, by the compiler: at most 5 GiB of 4 GiB"
    assert "at most 3 GiB" in lines[2]


@pytest.mark.slow
def test_libtpu_refuses_by_what_is_read(tmp_path, monkeypatch):
    require("axlearn_plugins_tpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    small = ["model.decoder.num_layers=2", "input.batch_size=64"]
    own = f"mesh.compiler_options.xla_dump_to={tmp_path / 'own'}"
    fits = make_plan(resolve("llama2-7b", set=small, target="tpu-v5p-8")).memory
    assert fits.fits
    assert not fits.is_upper_bound
    in_own_directory = make_plan(resolve("llama2-7b", set=[*small, own], target="tpu-v5p-8")).memory
    assert in_own_directory == fits
    assert any((tmp_path / "own").iterdir()), "a directory from the config is the user's, so it stays"

    by_message = []

    def refusal(message, arguments, machine, laid_out):
        assert laid_out is not None
        by_message.append(parse_out_of_memory(message, arguments, machine))
        return parse_out_of_memory(message, arguments, machine, laid_out)

    monkeypatch.setattr(compilation, "parse_out_of_memory", refusal)
    large = ["model.decoder.num_layers=2", "input.batch_size=4096", "model.decoder.stack.remat=null"]
    refused = make_plan(resolve("llama2-7b", set=large, target="tpu-v5p-8")).memory
    assert refused.out_of_memory
    assert by_message[0].total == pytest.approx(refused.total, rel=0.005), (
        "libtpu's message reports its buffer assignment"
    )
