"""Starts that need more memory than there is."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_core.errors import WorkError
from axlearn_plugins_serving.memory_errors import explain_memory
from axlearn_plugins_serving.runner import ModelRunner
from support.paths import HF_FIXTURES

LIMITED = """
import resource, sys
import jax
from axlearn_core.cli.main import main

jax.devices()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 6 * 2**30,) * 2)
sys.argv = ["axlearn", *sys.argv[1:]]
main()
"""
"""`axlearn` in a process that can allocate 6 GiB more."""


@pytest.fixture
def tiny_model():
    settings = {"decoder.num_layers": 1, "decoder.hidden_dim": 32}
    return patch(ax.resolve("quickstart").config.model, settings).build(rngs=nnx.Rngs(0))


def fail(error):
    with explain_memory("the cache", lambda: {"a": jax.ShapeDtypeStruct((2**20, 512), np.float32)}, "lower it"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 2 GiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2147483648 bytes.\nmore"),
    ],
    ids=["numpy", "xla"],
)
def test_an_error_says_what_does_not_fit(error):
    with pytest.raises(WorkError) as raised:
        fail(error)
    first, asked, got, fix = str(raised.value).splitlines()
    assert first.startswith("out of memory: the cache does not fit on ")
    assert asked == "    asked for: 2.00 GiB in total"
    assert got == f"    got: {str(error).splitlines()[0]}"
    assert fix == "    fix: lower it"


def test_other_errors_stay_as_they_are():
    error = RuntimeError("INVALID_ARGUMENT: wrong shape")
    with pytest.raises(RuntimeError) as raised:
        fail(error)
    assert raised.value is error


def test_weights_that_do_not_fit(tiny_model):
    def read():
        raise MemoryError("Unable to allocate 3 GiB")

    with pytest.raises(WorkError) as raised:
        ModelRunner.Config(max_rows=1, max_context=32).build(model=tiny_model, weights=read)
    assert "the model does not fit on cpu" in str(raised.value)
    assert "Unable to allocate 3 GiB" in str(raised.value)
    assert "serving.tensor_parallel" in str(raised.value)


@pytest.mark.slow
def test_a_cache_that_does_not_fit_ends_the_start():
    settings = ["--set", "serving.runner.num_blocks=10000000", "--port", "0"]
    command = [sys.executable, "-c", LIMITED, "serve", str(HF_FIXTURES / "llama3"), *settings]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result.stderr
    assert "out of memory: the cache does not fit on cpu" in result.stderr
    assert "fix: lower serving.runner.num_blocks" in result.stderr
    assert "Traceback" not in result.stderr
