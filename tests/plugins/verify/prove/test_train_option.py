"""`axlearn train --prove`."""

import types

import pytest

from axlearn_core.errors import RequestError
from axlearn_core.plugins.request import Request
from axlearn_plugins_verify.prove import train_option


@pytest.fixture
def proofs(monkeypatch):
    """Record the commands instead of running them. The exit code is that of the last proof in the list."""
    commands, codes = [], [0]

    def run(command, **options):
        commands.append(command)
        return types.SimpleNamespace(returncode=codes[-1])

    monkeypatch.setattr(train_option, "subprocess", types.SimpleNamespace(run=run))
    return commands, codes


REQUEST = Request.from_arguments("quickstart", with_=["moe:top_k=1"], set=["seed=3"], target="cpu-8")


def test_the_same_request_is_proven(proofs):
    commands, _ = proofs
    assert train_option.PROVE.change(True, REQUEST) is REQUEST
    ((_, *words),) = commands
    expected = "quickstart --with moe:top_k=1 --set seed=3 --target cpu-8 --minutes 2"
    assert words == ["-m", "axlearn_core", "prove", *expected.split()]


@pytest.mark.parametrize("code", [1, 2])
def test_nothing_is_trained_without_a_proof(proofs, code):
    proofs[1].append(code)
    with pytest.raises(RequestError, match="was not proven, so nothing was trained"):
        train_option.PROVE.change(True, REQUEST)


@pytest.mark.slow
def test_a_config_that_holds_is_trained(tmp_path):
    from support.cli_runs import run

    small = {"model.decoder.num_layers": 1, "model.decoder.hidden_dim": 32, "input.sequence_length": 16}
    words = [word for path, value in small.items() for word in ("--set", f"{path}={value}")]
    result = run("train", "quickstart", "--prove", "--steps", "1", *words, "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert "causality" in result.stderr
    assert (tmp_path / "run" / "metrics.jsonl").exists()
