"""`axlearn train --prove`."""

import types

import pytest

from axlearn_core.errors import RequestError, WorkError
from axlearn_core.plugins.request import Request
from axlearn_plugins_verify.prove import train_option
from support import cli_runs


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


@pytest.mark.parametrize(("code", "error"), [(1, WorkError), (2, RequestError)])
def test_nothing_is_trained_without_a_proof(proofs, code, error):
    proofs[1].append(code)
    with pytest.raises(error, match="did not pass, so nothing was trained") as raised:
        train_option.PROVE.change(True, REQUEST)
    assert raised.value.exit_code == code


LEAK = '''
import attrs
from axlearn_core.config import find, node, patch
from axlearn_core.plugins.feature import Feature
from axlearn_plugins_transformer.feed_forward import GatedFeedForward

class Leaky(GatedFeedForward):
    """Adds the mean over all positions."""

    @node
    class Config(GatedFeedForward.Config):
        pass

    def __call__(self, x):
        return super().__call__(x + x.mean(axis=1, keepdims=True))

@node
class Leak(Feature):
    """Puts a leak into every feed-forward network."""

    def apply(self, cfg):
        return patch(cfg, {p: Leaky.Config(hidden_dim=old.hidden_dim) for p, old in find(cfg, GatedFeedForward.Config).items()})
'''


def install_leak(site, monkeypatch):
    """Install a feature for the processes that this test starts."""
    facts = site / "leak-0.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: leak\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text("[axlearn.features]\nleak = leak_feature:Leak\n")
    (site / "leak_feature.py").write_text(LEAK)
    monkeypatch.setenv("PYTHONPATH", str(site))


SETTINGS = ("model.decoder.num_layers=1", "model.decoder.hidden_dim=32", "input.sequence_length=16", "evaluators={}")


def words(run_dir, *more):
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["train", "quickstart", "--prove", "--steps", "1", *settings, "--run-dir", str(run_dir), *more]


@pytest.mark.slow
def test_a_config_that_holds_is_trained(tmp_path):
    result = cli_runs.axlearn(*words(tmp_path / "run"), fresh=True)
    assert "causality" in result.stderr
    assert cli_runs.logged(tmp_path / "run") == [1]


@pytest.mark.slow
def test_a_config_that_fails_is_not_trained(tmp_path, monkeypatch):
    install_leak(tmp_path / "site", monkeypatch)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    result = cli_runs.axlearn(*words(run_dir, "--with", "leak"), fresh=True, code=1)
    assert "causality does not hold" in result.stderr
    assert "did not pass, so nothing was trained" in result.stderr
    assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]
    assert (run_dir / "notes.txt").read_text() == "mine"
