"""Checking properties: results, errors, seeds, the time limit, and the exit code of the command."""

import json
import shlex
import types

import attrs
import pytest
from click.testing import CliRunner

import axlearn_core as ax
from axlearn_core.cli.main import cli
from axlearn_core.errors import RequestError
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_verify.prove import checks, minimize, proof
from axlearn_plugins_verify.prove import shrink as shrinking
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.shrink import Shrunk
from support.paths import ROOT

PASSED = Outcome(error=1e-7, tolerance=1e-5, compared="two numbers")
DIFFERENCE = Difference(layer="decoder.layers.1.attention", tensor="output", error=0.5, detail="first token: [0, 3]")


class Fake:
    """A property with a given result.

    Args:
        result: An outcome, an error to raise, or the reason to skip it.
    """

    summary = "one number equals another"

    def __init__(self, result):
        self.result, self.seeds = result, []

    def skip_reason(self, case):
        return self.result if isinstance(self.result, str) else None

    def check(self, case):
        self.seeds.append(case.seed)
        result = self.result(case.config) if callable(self.result) else self.result
        if isinstance(result, Exception):
            raise result
        return result


def failed(difference=DIFFERENCE):
    return Outcome(error=0.5, tolerance=1e-5, compared="two numbers", difference=difference)


@pytest.fixture
def installed(monkeypatch):
    """Replace the installed properties, and keep configs as large as they are."""
    fakes = {}
    monkeypatch.setattr(proof, "properties", lambda: fakes)
    monkeypatch.setattr(
        proof, "shrink", lambda config, devices, deadline=0.0: Shrunk(config=config, meshes=(), changes={})
    )
    return fakes


def statuses(result):
    return [(check.name, check.seed, check.status) for check in result.checks]


def test_each_property_is_checked_on_each_seed(installed):
    installed.update(one=Fake(PASSED), other=Fake("the model has no logits"))
    result = proof.prove("quickstart", seed=3)
    assert statuses(result) == [("one", 3, "holds"), ("other", 3, "skipped"), ("one", 4, "holds")]
    assert result.checks[1].reason == "the model has no logits"
    assert installed["one"].seeds == [3, 4]
    assert result.holds
    assert result.minimal is None


@pytest.mark.parametrize(
    "error", [ValueError("shapes differ\nby far"), RequestError("the kernel needs a GPU")], ids=str
)
def test_an_error_of_a_check_is_a_failure(installed, error):
    installed["one"] = Fake(error)
    result = proof.prove("quickstart", seeds=1)
    assert statuses(result) == [("one", 0, "FAILS")]
    assert str(error).splitlines()[0] in result.failures[0].reason


def test_a_failure_names_the_smallest_request(installed):
    installed["one"] = Fake(lambda config: failed() if config.learner.ema_decay else PASSED)
    result = proof.prove("quickstart", with_=["ema", "rope"])
    assert not result.holds
    assert result.minimal.words[:4] == ("quickstart", "--with", "ema", "--set")
    assert result.minimal.features == ("ema",)
    assert result.minimal.check.outcome.difference == DIFFERENCE


def test_another_error_does_not_count_as_the_same_failure(installed):
    def result(config):
        return failed() if config.learner.ema_decay else ValueError("another problem")

    installed["one"] = Fake(result)
    assert proof.prove("quickstart", with_=["ema"], seeds=1).minimal.features == ("ema",)


@pytest.mark.slow
def test_the_printed_command_repeats_the_failure(monkeypatch):
    original = MixtureOfExperts.__call__
    monkeypatch.setattr(MixtureOfExperts, "__call__", lambda self, x: original(self, x.at[:, 1:].add(0.1 * x[:, :-1])))
    words = ["--with", "ema", "--with", "moe", "--with", "remat", "--only", "packed-documents", "--seeds", "1"]
    result = CliRunner().invoke(cli, ["prove", "quickstart", *words])
    assert result.exit_code == 1, result.output
    (printed,) = [line for line in result.output.splitlines() if line.startswith("smallest config that fails: ")]
    program, *arguments = shlex.split(printed.partition(": ")[2])
    assert program == "axlearn"
    assert [word for word in arguments if word in ("ema", "moe", "remat")] == ["moe"]
    assert "model.decoder.num_layers=1" in arguments
    again = CliRunner().invoke(cli, arguments)
    assert again.exit_code == 1, again.output
    assert "packed-documents does not hold" in again.output
    assert "first difference: decoder.layer.0.feed_forward" in again.output


def test_only_the_given_mesh_is_checked(installed, monkeypatch):
    class Meshes(Fake):
        def check(self, case):
            return attrs.evolve(PASSED, compared=str([*case.meshes]))

    installed["mesh"] = Meshes(PASSED)
    arguments = ["prove", "quickstart", "--seeds", "1", "--mesh"]
    assert "[{'data': 2, 'tensor': 2}]" in CliRunner().invoke(cli, [*arguments, "data=2, tensor=2"]).output
    for mesh, message in (
        ("dota=2", "did you mean: data"),
        ("data=3,tensor=4", "product of 2 to 8"),
        ("data", "not a mesh"),
        ("pipeline=2", "got: pipeline=2; mesh.shape.pipeline: no mesh rule uses this axis"),
        ("data=3", "not divisible by the mesh axes data (8 over 3 devices)"),
    ):
        result = CliRunner().invoke(cli, [*arguments, mesh])
        assert result.exit_code == 2
        assert message in result.output


def test_the_printed_command_has_the_given_mesh(installed):
    installed["mesh"] = Fake(failed())
    arguments = ["prove", "quickstart", "--seeds", "1", "--mesh", "data=2"]
    assert "--only mesh --mesh data=2" in CliRunner().invoke(cli, arguments).output


def test_a_mesh_that_only_the_small_config_lacks_is_skipped():
    features = ["pipeline:microbatches=2"]
    (check,) = proof.prove("quickstart", with_=features, only=["mesh"], seeds=1, mesh={"pipeline": 4}).checks
    assert check.status == "skipped"
    assert "the small config cannot use the mesh pipeline=4: model (decoder." in check.reason


def test_checks_after_the_time_limit_are_reported(installed, monkeypatch):
    installed.update(one=Fake(PASSED), other=Fake(PASSED))
    times = iter([0.0, 1.0, 400.0, 401.0])
    monkeypatch.setattr(proof, "time", types.SimpleNamespace(monotonic=lambda: next(times, 402.0)))
    result = proof.prove("quickstart", seeds=1, minutes=5)
    assert statuses(result) == [("one", 0, "holds"), ("other", 0, "not run")]
    assert result.holds


def test_a_failure_after_the_time_limit_is_reported(monkeypatch):
    """The first check ends after the limit, so there is no time to minimize the request."""
    late = Fake(lambda config: (clock.append(1000.0), failed())[1])
    clock = [0.0]
    monkeypatch.setattr(proof, "properties", lambda: {"late": late})
    for module in (proof, minimize, shrinking):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: sum(clock)))
    result = proof.prove("llama2-7b", seeds=1, minutes=5)
    assert [check.status for check in result.failures] == ["FAILS"]
    assert result.minimal is not None
    assert not result.minimal.complete


def test_an_unknown_property_names_the_nearest(installed):
    installed.update(causality=Fake(PASSED), padding=Fake(PASSED))
    with pytest.raises(RequestError, match=r"unknown property 'causalty'[\s\S]*did you mean: causality"):
        proof.prove("quickstart", only=["causalty"])


def test_a_config_that_is_no_experiment_is_refused(installed):
    model = ax.resolve("quickstart").config.model
    with pytest.raises(RequestError, match=r"expected a Trainer.Config"):
        proof.prove(model)


def test_the_command_prints_the_failure_and_exits_with_1(installed, tmp_path):
    installed.update(one=Fake(PASSED), two=Fake(failed()), three=Fake("it does not apply"))
    page = tmp_path / "proof.html"
    result = CliRunner().invoke(cli, ["prove", "quickstart", "--with", "ema", "--seeds", "1", "--report", str(page)])
    assert result.exit_code == 1, result.output
    assert "two does not hold: one number equals another" in result.output
    assert "first difference: decoder.layers.1.attention: output, error 0.5" in result.output
    assert "smallest config that fails: axlearn prove quickstart --set 'evaluators={}' --set " in result.output
    assert "1 passed, 1 failed, 1 skipped" in result.output
    text = page.read_text()
    assert "<td>it does not apply</td>" in text
    assert "two does not hold" in text


def test_the_command_prints_json(installed):
    installed.update(one=Fake(PASSED), two=Fake(failed(Difference(layer="", tensor="loss", error=float("nan")))))
    result = CliRunner().invoke(cli, ["prove", "quickstart", "--seed", "3", "--seeds", "1", "--json"])
    assert result.exit_code == 1
    values = json.loads(result.output)
    assert {check["seed"] for check in values["checks"]} == {3}
    assert [check["status"] for check in values["checks"]] == ["holds", "FAILS"]
    assert values["minimal"]["check"]["difference"]["error"] == "nan"


def test_the_command_limits_the_processes(installed, monkeypatch):
    installed.update({f"part-{i}": Fake(PASSED) for i in range(8)})
    started = []
    monkeypatch.setattr(checks.HelperProcess, "start", started.append)
    arguments = ["prove", "quickstart", "--seeds", "1"]
    for words, count in ((["--jobs", "1"], 0), (["--jobs", "8"], 1)):  # each process checks at least four properties
        started.clear()
        result = CliRunner().invoke(cli, [*arguments, *words])
        assert result.exit_code == 0, result.output
        assert "8 passed" in result.output
        assert len(started) == count
    assert CliRunner().invoke(cli, [*arguments, "--jobs", "0"]).exit_code == 2


def test_every_property_has_a_summary_and_is_documented():
    page = (ROOT / "docs" / "prove.md").read_text()
    for name, part in proof.properties().items():
        assert f"| `{name}` | {part.summary} |" in page, name
