"""Sizes beyond every model or machine are one error."""

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from axlearn_core.cli.main import cli

SIZES = (
    "input.batch_size=1000000000000",
    "input.sequence_length=100000000000",
    "input.workers=1000000",
    "model.vocab_size=1000000000000",
    "model.decoder.num_layers=1000000000",
    "model.decoder.hidden_dim=100000000000",
    "model.decoder.layer.attention.num_heads=1000000000000",
)


@pytest.mark.parametrize("setting", SIZES)
def test_a_size_beyond_every_model_is_one_error(setting):
    result = CliRunner().invoke(cli, ["config", "check", "quickstart", "--set", setting])
    assert result.exit_code == 2, result.output
    assert "out of range" in result.stderr
    assert "at most" in result.stderr


def test_memory_that_ends_is_one_error(monkeypatch):
    monkeypatch.setattr("axlearn_core.cli.config.resolve", lambda *_: np.ones(1 << 45))
    result = CliRunner().invoke(cli, ["config", "check", "quickstart"])
    assert result.exit_code == 1, result.output
    assert "out of memory: Unable to allocate 256. TiB" in result.stderr
    assert "`axlearn plan` estimates the memory" in result.stderr


def test_what_jax_says_of_memory_is_one_error(monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore")

    monkeypatch.setattr("axlearn_core.cli.config.resolve", fail)
    result = CliRunner().invoke(cli, ["config", "check", "quickstart"])
    assert result.exit_code == 1, result.output
    assert "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\n    fix:" in result.stderr
