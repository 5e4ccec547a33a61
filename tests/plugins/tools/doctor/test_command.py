"""`axlearn plugins doctor`, called in this process."""

import json

import pytest
from click.testing import CliRunner, Result

from axlearn_core.cli.main import cli


def run(*words: str) -> Result:
    result = CliRunner().invoke(cli, words, prog_name="axlearn")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


HOOK = "@hookimpl\ndef axlearn_targest():\n    return []"


@pytest.mark.slow
def test_doctor_goes_on_and_lists_everything(install, monkeypatch):
    points = {"components": {"well": "well_part:Part"}, "features": {"twice": "well_part:Twice"}}
    install("axlearn-plugins-well", modules={"well_part": "class Part:\n    pass"}, points=points)
    install(
        "axlearn-plugins-ill",
        modules={"ill_part": "raise OSError('no driver')", "ill_hook": "from axlearn_core import hookimpl\n" + HOOK},
        points={
            "features": {"ill": "ill_part:Ill", "twice": "ill_part:Rope"},
            "plugins": {"ill": "ill_hook"},
            "commands": {"blocked": "ill_part:x"},
        },
        requires=(),
    )
    install("axlearn-plugins-future", points={"experiments": {"next": "ill_part:x"}}, requires=("axlearn-core>=99",))
    monkeypatch.setenv("AXLEARN_PLUGINS", "-commands:blocked,-nothing-like-it")
    result = run("plugins", "doctor", "--json")
    assert result.exit_code == 1
    results = {(row["group"], row["name"], row["distribution"]): row for row in json.loads(result.stdout)}
    assert results["components", "well", "axlearn-plugins-well"]["status"] == "ok"
    for key, part in {
        ("features", "ill", "axlearn-plugins-ill"): "OSError: no driver",
        ("plugins", "ill", "axlearn-plugins-ill"): "did you mean: axlearn_targets",
        ("experiments", "next", "axlearn-plugins-future"): "requires axlearn-core >=99",
        ("features", "twice", "axlearn-plugins-ill"): "2 distributions register the feature 'twice'",
        ("features", "twice", "axlearn-plugins-well"): "2 distributions register the feature 'twice'",
    }.items():
        assert results[key]["status"] == "error"
        assert part in results[key]["message"]
    assert results["distribution", "axlearn-plugins-ill", "axlearn-plugins-ill"]["status"] == "warning"
    assert results["commands", "blocked", "axlearn-plugins-ill"]["status"] == "blocked"
    assert results["AXLEARN_PLUGINS", "nothing-like-it", ""]["status"] == "warning"
    text = run("plugins", "doctor")
    assert text.exit_code == 1
    assert "examined, " in text.stderr
    assert "with errors: " in text.stderr
    assert "features ill" in text.stderr


KERNELS = """
from axlearn_core import hookimpl
from axlearn_core.contracts.kernels import KernelImplementation

def kernel(op, name):
    return KernelImplementation(name=name, op=op, load="lost:KERNEL")

@hookimpl
def axlearn_kernels():
    return [
        kernel("lost_ops:Score", "near"), kernel("lost_ops:ScoreOp", "known"),
        kernel("axlearn_core.no_such_ops:Op", "gone"), kernel("not_installed.ops:Op", "absent"),
    ]
"""


def test_doctor_names_the_op_that_a_kernel_is_not_for(install):
    ops = "class ScoreOp:\n    pass"
    install("axlearn-plugins-lost", modules={"lost": KERNELS, "lost_ops": ops}, points={"plugins": {"lost": "lost"}})
    result = run("plugins", "doctor", "--json")
    rows = [row for row in json.loads(result.stdout) if row["name"] == "lost" and row["status"] == "error"]
    near = "the op lost_ops:Score of the kernel 'near' does not exist, so the kernel never runs; did you mean: lost_ops:ScoreOp?"
    assert [near in rows[0]["message"], "No module named 'axlearn_core.no_such_ops'" in rows[1]["message"]] == [
        True,
        True,
    ]
    assert (len(rows), result.exit_code) == (2, 1)
