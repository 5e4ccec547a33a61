"""Plans for hardware that is not here, by the compilers of that hardware."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def plan(*words: str, code: int = 0) -> dict:
    """What `axlearn plan` says, in a process that knows of no test settings."""
    command = [sys.executable, "-m", "axlearn_core", "plan", *words, "--json"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr[-4000:]
    return json.loads(done.stdout)


def needs(module: str, distribution: str):
    """Skips where the compiler is not installed."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"needs {distribution}[compile]")


def llama_flops(tokens: int, length: int, layers: int, width: int, kv: int, hidden: int, vocab: int) -> int:
    """Three passes over the matrices of a Llama and over all pairs of positions."""
    matrices = layers * (2 * width * width + 2 * width * kv + 3 * width * hidden) + width * vocab
    return 3 * 2 * tokens * (matrices + layers * 2 * width * length)


@needs("jax_cuda12_plugin", "axlearn-plugins-gpu")
def test_llama2_7b_on_256_h100():
    found = plan("llama2-7b", "--target", "h100-8x32")
    assert found["fits"]
    assert found["model_flops"] == llama_flops(1024 * 4096, 4096, 32, 4096, 4096, 11008, 32000)
    # The state in float32, parameters and two moments, over 256 GPUs.
    assert found["argument_bytes"] == pytest.approx(12 * found["parameters"] / 256, rel=0.02)
    # Gathered for the forward and for the backward pass in bfloat16, gradients summed: three times two bytes.
    assert sum(found["collective_bytes"].values()) == pytest.approx(3 * 2 * found["parameters"], rel=1.0)
    assert found["roofline_seconds"]["network"] > 0  # FSDP goes from host to host
    assert 0.5 < found["roofline_mfu"] < 1


@needs("jax_cuda12_plugin", "axlearn-plugins-gpu")
def test_what_does_not_fit_on_gpus_is_found():
    words = (
        "llama2-7b",
        "--target",
        "h100-8x1",
        "--set",
        "input.batch_size=256",
        "--set",
        "model.decoder.num_layers=8",
    )
    found = plan(*words, code=1)
    assert not found["fits"]
    assert found["temporary_bytes"] > found["hbm_bytes"]
    assert len(found["remedies"]) == 3
    # What the cheapest remedy says holds when it is tried.
    assert found["remedies"][0]["estimated_bytes"] < found["hbm_bytes"]
    fixed = plan(*words, *found["remedies"][0]["words"].replace("'", "").split(" ", 1))
    assert fixed["fits"]


@needs("libtpu", "axlearn-plugins-tpu")
def test_two_layers_of_llama2_70b_on_512_v5p():
    found = plan("llama2-70b", "--target", "tpu-v5p-1024", "--set", "model.decoder.num_layers=2")
    assert found["fits"]
    assert found["model_flops"] == llama_flops(1024 * 4096, 4096, 2, 8192, 1024, 28672, 32000)
    assert {k["name"]: k["kernel"] for k in found["kernels"]}["attention"] == "splash"
    assert set(found["collective_bytes"]) == {"fsdp"}
    assert found["roofline_seconds"]["network"] == 0  # one slice


@needs("libtpu", "axlearn-plugins-tpu")
def test_what_the_tpu_compiler_refuses_is_a_plan_too():
    settings = ("--set", "model.decoder.num_layers=2", "--set", "input.batch_size=64")
    found = plan("llama2-70b", "--target", "tpu-v5e-4", *settings, code=1)
    assert not found["fits"]
    assert found["collective_bytes"] is None
    assert found["temporary_bytes"] > 0
    assert any("the compiler stopped" in note for note in found["notes"])
    assert found["remedies"]
