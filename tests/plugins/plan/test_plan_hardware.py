"""Plans for absent hardware, with that hardware's compilers."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.needs import needs

pytestmark = pytest.mark.slow


def plan(*words: str, code: int = 0) -> dict:
    """Return the output of `axlearn plan` from a process without test settings."""
    command = [sys.executable, "-m", "axlearn_core", "plan", *words, "--json"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    assert process.returncode == code, process.stderr[-4000:]
    return json.loads(process.stdout)


def llama_flops(tokens: int, length: int, layers: int, width: int, kv: int, hidden: int, vocab: int) -> int:
    """Return the FLOPs of three passes over a Llama's matrices and all pairs of positions."""
    matrices = layers * (2 * width * width + 2 * width * kv + 3 * width * hidden) + width * vocab
    return 3 * 2 * tokens * (matrices + layers * 2 * width * length)


@needs("jax_cuda12_plugin")
def test_llama2_7b_on_256_h100():
    actual = plan("llama2-7b", "--target", "h100-8x32")
    assert actual["fits"]
    assert actual["model_flops"] == llama_flops(1024 * 4096, 4096, 32, 4096, 4096, 11008, 32000)
    # Float32 parameters and two moments, sharded over 32 GPUs. There are eight copies of the state.
    assert actual["argument_bytes"] == pytest.approx(12 * actual["parameters"] / 32, rel=0.02)
    # Both passes gather bfloat16 parameters, and gradients are summed: three times two bytes, of which each
    # GPU has a 32nd. Then the eight copies all-reduce these shards.
    sent, parameters = actual["collective_bytes"], actual["parameters"]
    assert sent["fsdp"] == pytest.approx(3 * 2 * parameters * 31 / 32, rel=0.02)
    assert sent["data"] == pytest.approx(2 * 2 * parameters / 32 * 7 / 8, rel=0.01)
    assert sum(sent.values()) == pytest.approx(sent["fsdp"] + sent["data"], rel=0.001)
    assert actual["roofline_seconds"]["network"] > 0  # FSDP crosses hosts
    # The kernel skips masked pairs and almost nothing is recomputed, so only the causal share stays below 1.
    assert 0.5 < actual["roofline_mfu_causal"] < 1 < actual["roofline_mfu"]
    assert "which the kernel skips" in actual["roofline_mfu_note"]


@needs("jax_cuda12_plugin")
def test_what_does_not_fit_on_gpus_is_found():
    words = (
        "llama2-7b",
        "--target",
        "h100-8x1",
        "--set",
        "input.batch_size=384",
        "--set",
        "model.decoder.num_layers=8",
    )
    actual = plan(*words, code=1)
    assert not actual["fits"]
    assert actual["temporary_bytes"] > actual["hbm_bytes"]
    assert len(actual["remedies"]) == 3
    # The estimate of the cheapest remedy holds when it is compiled.
    assert actual["remedies"][0]["estimated_bytes"] < actual["hbm_bytes"]
    fixed = plan(*words, *actual["remedies"][0]["words"].replace("'", "").split(" ", 1))
    assert fixed["fits"]


SMALL = {
    "model.decoder.num_layers": 2, "model.decoder.hidden_dim": 512, "model.decoder.layer.attention.num_heads": 4,
    "model.decoder.layer.feed_forward.hidden_dim": 1024, "model.vocab_size": 2048, "input.batch_size": 8,
    "input.sequence_length": 512,
}  # fmt: skip
"""Settings that shrink `llama2-7b`, so that the TPU compiler takes seconds."""


@needs("libtpu")
def test_plans_for_tpus_two_at_once():
    words = ["llama2-7b", "--target", "tpu-v5p-8", *(w for k, v in SMALL.items() for w in ("--set", f"{k}={v}"))]
    with ThreadPoolExecutor(2) as pool:
        actual, other = pool.map(lambda _: plan(*words), range(2))
    assert actual["fits"]
    assert actual["model_flops"] == llama_flops(8 * 512, 512, 2, 512, 512, 1024, 2048)
    assert {k["name"]: k["kernel"] for k in actual["kernels"]}["attention"] == "splash"
    assert set(actual["collective_bytes"]) == {"fsdp"}
    assert actual["roofline_seconds"]["network"] == 0  # one slice
    timed = {"compile_seconds"}
    assert {k: v for k, v in actual.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}


@needs("libtpu")
def test_gradients_go_from_slice_to_slice():
    words = ["llama2-7b", "--target", "tpu-v5p-8x2", *(w for k, v in SMALL.items() for w in ("--set", f"{k}={v}"))]
    actual = plan(*words)
    assert actual["mesh"] == {"data": 2, "fsdp": 4}
    # Each chip of a slice has a quarter of the bfloat16 gradients, and sends half of it twice (a ring of two).
    gradients = 2 * actual["parameters"] / 4
    assert 0.9 < actual["collective_bytes"]["data"] / gradients < 1.2
    assert actual["roofline_seconds"]["network"] > 0


@needs("libtpu")
def test_what_the_tpu_compiler_refuses_is_a_plan_too():
    """The logits alone exceed a chip's memory: all 4,096 positions of 32 rows per chip at once."""
    more = SMALL | {"input.batch_size": 128, "input.sequence_length": 4096, "model.vocab_size": 32000}
    more |= {"model.loss_chunk": 4096}
    words = [w for k, v in more.items() for w in ("--set", f"{k}={v}")]
    actual = plan("llama2-7b", "--target", "tpu-v5e-4", *words, code=1)
    assert not actual["fits"]
    assert actual["collective_bytes"] is None
    assert actual["temporary_bytes"] > 0
    assert any("the compiler ran out of memory" in note for note in actual["notes"])
    assert actual["remedies"]
