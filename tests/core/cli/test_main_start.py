"""How fast the command line starts, and what it leaves unimported: real processes."""

import json
import os
import subprocess
import sys

import pytest

from axlearn_core.plugins.registry import GROUPS, registry

IMPORTED = """
import json, sys
from axlearn_core.cli.main import main
try:
    main()
except SystemExit as exit:
    print(json.dumps([exit.code, sorted({m.partition(".")[0] for m in sys.modules} | set(sys.modules))]))
"""
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy", "tensorstore"}


def imported(*words: str) -> set[str]:
    process = subprocess.run([sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, check=True)
    code, modules = json.loads(process.stdout.splitlines()[-1])
    assert not code, process.stderr
    return set(modules)


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_imports_no_jax_no_trees_and_no_plugins(words):
    modules = imported(*words)
    assert not modules & HEAVY
    assert not {m for m in modules if m.startswith(("axlearn_plugins", "axlearn_core.config", "rich", "cattrs"))}


@pytest.mark.fast_cases("words2", "words3")
@pytest.mark.parametrize(
    "words", [["experiments", "list"], ["features", "list"], ["plugins", "list", "--json"], ["plugins", "show", "core"]]
)
def test_listing_imports_no_jax_and_no_plugins(words):
    modules = imported(*words)
    assert not modules & HEAVY
    assert not {m for m in modules if m.startswith(("axlearn_plugins", "axlearn_core.config"))}


def test_the_package_and_its_config_names_import_no_jax():
    code = (
        "import sys, axlearn_core as ax; assert not hasattr(sys.modules['axlearn_core'], 'config')\n"
        "names = ax.Node, ax.REQUIRED, ax.resolve, ax.Feature, ax.hookimpl, ax.patch, ax.diff, ax.configure, ax.node\n"
        "names += ax.interface, ax.replace_config\n"
        "from axlearn_core.plugins.manager import host; host().target('cpu')\n"
        f"assert not set(sys.modules) & {HEAVY!r}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.fast_cases("words0-80")
@pytest.mark.parametrize(("words", "most"), [(["--help"], 80), (["experiments", "list"], 160)])
def test_start_imports_little(words, most):
    # Beyond what the libraries below it import. `benchmarks/startup.py` measures the time.
    code = "import click, importlib_metadata, json, sys; print(json.dumps(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = imported(*words) - set(json.loads(process.stdout))
    assert len(modules) < most, sorted(modules)
    assert ("attr" in modules) == (words != ["--help"])


def test_exit_codes_and_streams_of_a_real_process(tmp_path):
    command = [sys.executable, "-m", "axlearn_core"]
    process = subprocess.run([*command, "config", "show", "no-such-thing"], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: unknown experiment 'no-such-thing'")
    process = subprocess.run([*command, "experiments", "list", "--jsn"], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert "--json" in process.stderr


@pytest.mark.slow
def test_a_hook_module_that_imports_jax_is_warned_of(install):
    site = install(
        "axlearn-plugins-slow", modules={"slow_hooks": "import jax"}, points={"plugins": {"slow": "slow_hooks"}}
    )
    installed = {"axlearn-plugins-slow", "axlearn-plugins-tools"}
    other_plugins = {e.distribution for group in GROUPS for e in registry().entries(group)} - installed
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
        "AXLEARN_PLUGINS": ",".join(f"-{name}" for name in other_plugins),  # loading all of them takes its time
    }
    command = [sys.executable, "-m", "axlearn_core", "plugins", "doctor", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    assert process.returncode == 0
    (row,) = [row for row in json.loads(process.stdout) if row["name"] == "slow"]
    assert row["status"] == "warning"
    assert "imports jax" in row["message"]
