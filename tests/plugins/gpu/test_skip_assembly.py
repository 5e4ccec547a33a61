"""Programs without machine code have the plans of complete ones."""

import subprocess
from pathlib import Path

import attrs
import pytest

import axlearn_core as ax
from axlearn_core.plugins.request import Request
from axlearn_plugins_gpu.skip_assembly import skip_assembly
from axlearn_plugins_plan.plan import make_plan
from support.needs import needs

SMALL = {
    "model.decoder.num_layers": 2, "model.decoder.hidden_dim": 256, "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 512, "model.vocab_size": 512, "input.batch_size": 8,
    "input.sequence_length": 256,
}  # fmt: skip


def test_the_assembler_answers_as_xla_expects(tmp_path):
    with skip_assembly() as options:
        directory = Path(options["xla_gpu_cuda_data_dir"])
        assembler = directory / "bin" / "ptxas"
        version = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=True).stdout
        assert "release 12.9, V12.9.86" in version
        subprocess.run([assembler, tmp_path / "in", "-o", tmp_path / "out", "-arch=sm_90a", "-v"], check=True)
        assert (tmp_path / "out").read_bytes() == b"\x7fELF"
    assert not directory.exists()


@pytest.mark.slow
@needs("jax_cuda12_plugin")
def test_a_plan_does_not_depend_on_machine_code():
    resolved = ax.resolve(Request.from_arguments("llama2-7b", target="h100-8x1", set=SMALL))
    assert resolved.machine is not None
    complete = attrs.evolve(resolved.machine.target, skip_assembly=None)
    plans = [make_plan(attrs.evolve(resolved, machine=attrs.evolve(resolved.machine, target=target)))
             for target in (resolved.machine.target, complete)]  # fmt: skip
    ours, other = (attrs.evolve(p, compile_seconds=0.0, machine=resolved.machine) for p in plans)
    assert str(ours) == str(other)
    assert (ours.memory, ours.collectives, ours.hbm_traffic) == (other.memory, other.collectives, other.hbm_traffic)
