"""The benchmark of changed lines, small: what it counts, and that its proof of a cell can fail."""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.slow  # a repository per case, and a forward pass per cell

FEATURES = ("rope", "moe", "token-shift", "dropout", "fp8-cache", "label-smoothing", "min-gru", "head-sinks")


@pytest.fixture(scope="module")
def parts():
    """The benchmark's modules."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from loc_projects import cells, count, features, installed, modules, packages, subtyping

        yield {
            "cells": cells,
            "count": count,
            "features": features,
            "installed": installed,
            "modules": modules,
            "packages": packages,
            "subtyping": subtyping,
        }
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def small():
    """What it prints for two modules in two experiments."""
    options = ["--modules", "2", "--experiments", "2", "--configs", "40", "--json"]
    process = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/loc_complexity.py"), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


def test_nothing_of_ours_grows_and_every_cell_is_active(small):
    assert small["cells"] == small["active_cells"] == 4
    assert small["slopes"] == {f: {"N": 0.0, "M": 0.0} for f in FEATURES}
    assert small["changed_lines"] == dict.fromkeys(FEATURES, 0)
    assert small["activation_lines"] == dict.fromkeys(FEATURES, 1)
    assert small["modifier_lines"].keys() == set(FEATURES)
    assert all(lines <= 10 for lines in small["modifier_lines"].values())
    assert (
        0 < small["seconds"]["apply"] < small["timed_configs"] * 0.02
    )  # ten times what is promised, for a busy machine


def test_the_subtypes_grow_with_both(small):
    base = small["baseline"]
    assert base["active_cells"] == 4
    for feature in FEATURES:
        assert base["slopes"][feature]["N"] > 0
        assert base["slopes"][feature]["M"] > 0
        assert base["changed_lines"][feature] >= (6 if feature == "label-smoothing" else 20)


def test_what_is_counted(parts, tmp_path):
    count, modules, features = parts["count"], parts["modules"], parts["features"]
    modules.write(tmp_path, 2, 1)
    count.commit(tmp_path)
    features.integrate(tmp_path, "token-shift")
    assert count.changed(tmp_path) == {"launch.py": 1}  # the package of the feature is its own
    block = tmp_path / "src/zoo/blocks/block_00.py"
    block.write_text(block.read_text().replace("Block 00", "Block zero", 1) + "# one more\n")
    (tmp_path / "run.yaml").write_text("experiment: experiment-00-block-00\nset: {}\n")
    assert count.changed(tmp_path) == {"launch.py": 1, "run.yaml": 2, "src/zoo/blocks/block_00.py": 2}
    count.undo(tmp_path)
    assert count.changed(tmp_path) == {}


def test_slopes():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from loc_projects import count

    assert count.slope((1, 2, 5), (1, 1, 1)) == 0
    assert count.slope((1, 2, 5), (3, 5, 11)) == pytest.approx(2)
    assert count.slope((1, 10), (1, 2)) > 0


@pytest.fixture(scope="module")
def project(parts, tmp_path_factory):
    """An installed project with the packages of features in it, and (features) -> the config of an experiment."""
    from axlearn_core.plugins.resolve import resolve

    root = tmp_path_factory.mktemp("project")
    parts["modules"].write(root, 2, 1)
    for feature in parts["packages"].SOURCES:
        parts["packages"].write(root, feature)
    own = [parts["packages"].folder(root, feature) for feature in parts["packages"].SOURCES]
    with parts["installed"].installed(root, *own, site=root / "site"):
        yield lambda *with_: resolve("experiment-00-block-01", with_=with_).check().config


@pytest.mark.parametrize(
    ("feature", "wrong"),
    [
        ("rope", "rope:theta=90"),
        ("moe", "moe:num_experts=4,top_k=1"),
        ("token-shift", "token-shift:mix=0.31"),
        ("dropout", "dropout:rate=0.4,embedding=false"),
        ("fp8-cache", "fp8-cache:dtype=float8_e5m2"),
        ("label-smoothing", "label-smoothing:amount=0.21"),
        ("min-gru", "min-gru:gate_bias=0.4"),
        ("head-sinks", "head-sinks:start=1.1"),
    ],
)
def test_the_proof_can_fail(parts, project, feature, wrong):
    active = parts["cells"].active
    plain, activated = project(), project(parts["features"].ACTIVATION[feature])
    assert active(plain, activated, feature)
    assert not active(plain, project(wrong), feature), "another output than the one placed by hand"
    assert not active(activated, activated, feature), "an output that does not change"


def test_no_two_modules_and_no_two_experiments_are_the_same(parts):
    modules = parts["modules"]
    assert len({modules.block(i).replace(f"{i:02}", "") for i in range(60)}) == 60
    assert len({modules.experiment(j, 1) for j in range(99)}) == 99
