"""`train` without a target on a machine that is known: what it brings, what it says, what the lock keeps."""

import json

import pytest

from axlearn_core.compose import devices
from axlearn_core.contracts.mesh import MeshRule
from axlearn_core.contracts.target import DetectedMachine, Target
from axlearn_core.errors import RequestError
from axlearn_core.plugins import resolve as resolution
from axlearn_core.train import train

TINY = {
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "input.batch_size": 8,
    "input.sequence_length": 32,
    "evaluators": {},
}
TOY = Target(name="toy", size="hosts", device_kinds=("cpu",), platform="cpu")
RULE = MeshRule(
    target="toy-*",
    shape={"fsdp": -1, "tensor": 2},
    features=("precision:dtype=bfloat16", "remat", "scan"),
    packages={"scan": "axlearn-plugins-tools"},
)


@pytest.fixture
def toy(monkeypatch):
    """The eight virtual devices are a machine with a mesh rule."""
    machine = TOY.machine("toy-8x1")
    monkeypatch.setattr(devices, "detect", lambda: DetectedMachine(description="8 x Toy", machine=machine))
    monkeypatch.setattr(resolution, "find_rule", lambda *_: ("mesh rule 'toy-*' (toy of toys 1.0)", RULE))


def lock(run_dir):
    return json.loads((run_dir / "run.lock.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_run_says_and_keeps_what_was_decided(tmp_path, capfd):
    result = train("quickstart", steps=2, set=TINY, run_dir=tmp_path / "run")
    lock_data = lock(result.run_dir)
    assert [(d["kind"], d["subject"]) for d in lock_data["decisions"]] == [
        ("machine", "toy-8x1, 8 x Toy"),
        ("mesh rule", "'toy-*' (toy of toys 1.0)"),
        ("left out", "precision:dtype=bfloat16"),
        ("applied", "remat"),
        ("applied", "scan"),
        ("applied", "mesh"),
    ]
    assert lock_data["mesh"] == {"fsdp": 4, "tensor": 2}
    assert lock_data["provenance"]["model.decoder.stack.mode"][-1]["by"].startswith("feature scan (")
    assert lock_data["provenance"]["mesh.shape.tensor"][-1]["by"] == "mesh rule 'toy-*' (toy of toys 1.0)"
    output = capfd.readouterr().err
    assert "machine: toy-8x1, 8 x Toy\nmesh rule: 'toy-*' (toy of toys 1.0)\n    left out: precision:" in output
    assert "    applied: mesh (mesh.shape.fsdp: (absent) -> -1; mesh.shape.tensor: (absent) -> 2)\n" in output
    # It goes on without the rule: that is another execution.
    again = train("quickstart", steps=3, set=TINY, run_dir=tmp_path / "run", target="none")
    assert again.step == 3
    assert lock(result.run_dir)["decisions"] == [{"kind": "mesh rule", "subject": "none", "reason": "--target none"}]


@pytest.mark.slow
def test_the_name_of_a_run_does_not_depend_on_the_machine(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    plain = train("quickstart", steps=1, set=TINY)
    assert [d["kind"] for d in lock(plain.run_dir)["decisions"]] == ["machine", "mesh rule"]
    request.getfixturevalue("toy")
    assert train("quickstart", steps=1, set=TINY).run_dir == plain.run_dir


@pytest.mark.slow
def test_a_machine_that_nobody_knows_trains_without_a_rule(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(devices, "detect", lambda: DetectedMachine(description="8 x Abacus", machine=None))
    train("quickstart", steps=1, set=TINY, run_dir=tmp_path / "run")
    assert "machine: 8 x Abacus (no installed package supports it: no mesh rule)\n" in capfd.readouterr().err


@pytest.mark.usefixtures("toy")
def test_a_missing_feature_of_a_mesh_rule_stops_before_writing(tmp_path, monkeypatch):
    rule = MeshRule(target="toy-*", features=("warp",), packages={"warp": "axlearn-plugins-loom"})
    monkeypatch.setattr(resolution, "find_rule", lambda *_: ("mesh rule 'toy-*'", rule))
    with pytest.raises(RequestError, match="pip install axlearn-plugins-loom"):
        train("quickstart", steps=1, set=TINY, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
