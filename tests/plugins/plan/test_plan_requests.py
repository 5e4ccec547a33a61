"""A wrong request for a plan gives one clear error and exit code 2."""

import importlib.util

import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli

LAYER = "model.decoder.layer"


def refused(*words: str) -> str:
    """Return the error of `axlearn plan` for a wrong request."""
    result = CliRunner().invoke(cli, ["plan", *words])
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.mark.slow_cases("cpu-8-model.decoder.layer.attention.kernel=cudnn-reason6")
@pytest.mark.parametrize(
    ("target", "setting", "reason"),
    [
        ("tpu-v5", None, ["unknown target 'tpu-v5'", "did you mean: tpu-v5"]),
        ("h10-8x4", None, ["unknown target 'h10-8x4'", "h100"]),
        (
            "cpu-8",
            "mesh.shape={fsdp: 3}",
            ["mesh.shape", "its product is not the number of devices", "expected: 8 devices"],
        ),
        ("cpu-8", "mesh.shape={pipeline: 2, fsdp: 4}", ["mesh.shape.pipeline", "no mesh rule", "--with pipeline"]),
        ("cpu-8", "mesh.shape={tensors: 2}", ["mesh.shape", "tensors", "tensor"]),
        ("cpu-8", "mesh.shape={tensor: 8}", ["attention.key.weight", "(kv) is not divisible", "4 over 8 devices"]),
        (
            "cpu-8",
            f"{LAYER}.attention.kernel=cudnn",
            ["the attention kernel 'cudnn'", "runs on gpu, not on cpu", "fix"],
        ),
        ("cpu-8", f"{LAYER}.attention.kernel=cudn", ["unknown attention kernel 'cudn'", "did you mean: cudnn"]),
        (
            "cpu-8",
            "input.batch_size=2",
            ["input (weights)", "2 over 8 devices", "a multiple of 8", "context-parallel", "{seq: 4, fsdp: -1}"],
        ),
    ],
)
def test_it_says_what_is_wrong(target, setting, reason):
    words = ["--set", "model.decoder.num_layers=1", *(("--set", setting) if setting else ())]
    error = refused("quickstart", "--target", target, *words)
    assert not [s for s in reason if s not in error], error


@pytest.mark.parametrize(
    ("target", "module", "extra"),
    [
        ("tpu-v5p-8", "axlearn_plugins_tpu.topology.find_spec", "pip install 'jax[tpu]'"),
        ("h100-8x1", "importlib.util.find_spec", "pip install jax-cuda12-plugin"),
    ],
)
def test_without_a_compiler_it_says_what_to_install(monkeypatch, target, module, extra):

    find_spec = importlib.util.find_spec

    def without_compilers(name, *rest):
        return None if name in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin") else find_spec(name, *rest)

    monkeypatch.setattr(module, without_compilers)
    error = refused("quickstart", "--target", target, "--set", "model.decoder.num_layers=1")
    assert f"cannot compile for '{target}'" in error
    assert extra in error
