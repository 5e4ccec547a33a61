"""Names of the package: `from axlearn_plugins_verify import prove, replay`, without importing JAX."""

import subprocess
import sys

import pytest

import axlearn_plugins_verify
from axlearn_plugins_verify import prove, replay
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.proof import Check, Proof
from axlearn_plugins_verify.prove.proof import prove as prove_config
from axlearn_plugins_verify.prove.shrink import Shrunk
from axlearn_plugins_verify.replay import Replay


def test_importing_the_names_imports_no_jax():
    names = "import sys; from axlearn_plugins_verify import prove, replay"
    code = f"{names}; print(callable(prove), callable(replay), 'jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True", "False"]


def test_the_names_call_the_functions():
    with pytest.raises(Exception, match="unknown property 'nothing'"):
        prove("quickstart", only=["nothing"])
    with pytest.raises(Exception, match="no-run"):
        replay("no-run", step=1)
    assert prove.prove is prove_config


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'disprove'"):
        axlearn_plugins_verify.disprove  # noqa: B018


def proof(*checks):
    return Proof(
        title="mine", checks=checks, shrunk=Shrunk(config=None, meshes=(), changes={}), minimal=None, seconds=1
    )


def test_a_proof_is_shown_in_notebooks():
    difference = Difference(layer="decoder", tensor="<output>", error=0.5)
    failed = Outcome(error=0.5, tolerance=1e-5, compared="two <numbers>", difference=difference)
    holds = Check(name="one", summary="", seed=0, status="holds", outcome=Outcome(error=0, tolerance=1, compared="a"))
    fails = Check(name="two", summary="", seed=0, status="FAILS", outcome=failed)
    assert repr(proof(holds, fails)) == "Proof(mine, 1 check passed, 1 failed)"
    shown = proof(holds, fails)._repr_html_()
    assert "&lt;output&gt;" in shown
    assert "two &lt;numbers&gt;" in shown
    assert "two does not hold" in shown
    assert "does not hold" not in proof(holds)._repr_html_()


def test_a_replay_is_shown_in_notebooks():
    result = Replay(run="runs/<a>", step=1200, start=1000, compared_steps=(1200,), compared_scalars=3)
    assert repr(result) == "Replay(step 1,200 of runs/<a>, bit-identical)"
    shown = result._repr_html_()
    assert "runs/&lt;a&gt;" in shown
    assert "computed again from the checkpoint of step 1,000" in shown
