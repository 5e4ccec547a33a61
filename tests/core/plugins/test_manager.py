"""Hooks: loaded by name, misspelled ones refused, two claims on one thing named; every hook documented and tested."""

import types
from pathlib import Path

import pluggy
import pytest

from axlearn_core.checkpoint import LocalStorage
from axlearn_core.contracts.target import Target
from axlearn_core.errors import PluginError
from axlearn_core.plugins import hookspecs
from axlearn_core.plugins.manager import Host, host
from axlearn_core.plugins.registry import registry
from support.paths import ROOT

HOOKS = [name for name in vars(hookspecs) if name.startswith("axlearn_")]

CHIP = """
from axlearn_core.contracts.target import Target
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_targets():
    return [Target(name="chip-{0}", device_kinds=("Chip", "Chip {0}"), peak_flops={{"bfloat16": 1e15}})]

@hookimpl
def axlearn_checkpoint_storage(uri):
    return "storage {0}" if uri.startswith("mem{0}:") or uri.startswith("both:") else None

@hookimpl
def axlearn_kernels():
    return ["kernel {0}"]
"""


def install_chip(install, number):
    module = f"chip_part{number}"
    install(
        f"axlearn-plugins-chip{number}",
        modules={module: CHIP.format(number)},
        points={"plugins": {f"chip{number}": module}},
    )


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_heading_and_a_test(hook):
    assert f"\n## `{hook}(" in (ROOT / "docs" / "hooks.md").read_text()
    tests = [p for p in (ROOT / "tests").rglob("test_*.py") if p != Path(__file__)]
    used = Path(__file__).read_text().count(f'{hook}("') + Path(__file__).read_text().count(f'"{hook}"')
    assert used or any(hook in p.read_text() for p in tests)


def test_the_documentation_names_no_hook_that_is_gone():
    headings = [line for line in (ROOT / "docs" / "hooks.md").read_text().splitlines() if line.startswith("## `")]
    assert sorted(h.removeprefix("## `").partition("(")[0] for h in headings) == sorted(HOOKS)


def test_the_core_says_that_a_cpu_has_no_peak():
    target = host().target("cpu")
    assert target is not None
    assert target.name == "cpu"
    assert not target.peak_flops
    assert host().target("abacus") is None


def test_targets_of_a_plugin(install):
    install_chip(install, 1)
    assert host().target("Chip 1") == Target(
        name="chip-1", device_kinds=("Chip", "Chip 1"), peak_flops={"bfloat16": 1e15}
    )
    titles = [title for title, _ in host().call("axlearn_targets")]
    assert "chip1 of axlearn-plugins-chip1 1.0" in titles


def test_two_plugins_that_know_one_device(install):
    install_chip(install, 1)
    install_chip(install, 2)
    with pytest.raises(PluginError, match=r"device kind 'Chip' is claimed by chip1 of .*chip1 1.0 .* and by chip2 of"):
        host().target("Chip")


def test_storage_has_one_owner(install):
    install_chip(install, 1)
    install_chip(install, 2)
    assert host().call_single("axlearn_checkpoint_storage", uri="mem2://x") == "storage 2"
    assert host().call_single("axlearn_checkpoint_storage", uri="nobody://x") is None
    with pytest.raises(PluginError, match=r"uri='both://x'\) is claimed by chip1 of .* and by chip2 of"):
        host().call_single("axlearn_checkpoint_storage", uri="both://x")


def test_kernels_come_from_every_plugin(install):
    before = host().hook.axlearn_kernels()
    install_chip(install, 1)
    actual = [k for kernels in host().hook.axlearn_kernels() for k in kernels]
    assert "kernel 1" in actual
    assert len(actual) == sum(map(len, before)) + 1
    assert dict(host().call("axlearn_kernels"))["chip1 of axlearn-plugins-chip1 1.0"] == ["kernel 1"]


def test_the_order_of_sys_path_changes_nothing(install):
    install_chip(install, 2)
    install_chip(install, 1)
    names = [title for title, _ in host().call("axlearn_kernels") if "chip" in title]
    assert names == ["chip1 of axlearn-plugins-chip1 1.0", "chip2 of axlearn-plugins-chip2 1.0"]
    assert list(host().entries) == sorted(host().entries)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def axlearn_target(): pass", ["'axlearn_target', which does not exist", "did you mean: axlearn_targets"]),
        ("def axlearn_kernels(opp): pass", ["wrong signature", "opp"]),
        ("raise OSError('no driver')", ["OSError: no driver"]),
    ],
)
def test_a_module_that_does_not_fit_stops_whatever_needs_hooks(install, source, expected):
    code = f"from axlearn_core.plugins.hookspecs import hookimpl\n{'@hookimpl' if 'def' in source else ''}\n{source}"
    install("axlearn-plugins-odd", "0.7", modules={"odd_part": code}, points={"plugins": {"odd": "odd_part"}})
    with pytest.raises(PluginError) as caught:
        host()
    for part in ("axlearn.plugins entry point 'odd'", "axlearn-plugins-odd 0.7", *expected):
        assert part in str(caught.value)


def test_a_hook_that_has_no_marker_is_not_a_hook(install):
    install(
        "axlearn-plugins-plain",
        modules={"plain_part": "def axlearn_targets():\n    raise AssertionError"},
        points={"plugins": {"plain": "plain_part"}},
    )
    assert Host(registry()).target("cpu") is not None


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_each_hook_can_be_registered(hook):
    section = (ROOT / "docs" / "hooks.md").read_text().partition(f"\n## `{hook}(")[2]
    module = types.ModuleType("example")
    exec(section.partition("```python\n")[2].partition("```")[0], vars(module))
    manager = pluggy.PluginManager("axlearn")
    manager.add_hookspecs(hookspecs)
    manager.register(module)
    manager.check_pending()
    arguments = {
        "axlearn_before_devices": {"platforms": None},
        "axlearn_checkpoint_storage": {"uri": "other://x"},
        "axlearn_weights": {"uri": "elsewhere"},
        "axlearn_foreign_checkpoints": {"storage": LocalStorage("elsewhere"), "folder": "", "uri": "elsewhere"},
    }
    answers = getattr(manager.hook, hook)(**arguments.get(hook, {}))
    assert bool(answers) == (hook not in arguments)
