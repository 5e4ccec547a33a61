"""Checks that plugins add to `axlearn plugins doctor`, and hooks that fail in it."""

import pytest

from axlearn_core.plugins.registry import Registry
from axlearn_plugins_tools.doctor.examine import examine

HOOKS = """
from axlearn_core.plugins.hookspecs import hookimpl

@hookimpl
def axlearn_doctor_checks():
    {body}
"""
CHECKS = """
from axlearn_core.extend import Finding

def whole():
    return [Finding(name="driver", status="ok"), Finding(name="fan", group="hardware", status="warning", message="slow")]

def foreign():
    yield Finding(name="thing", distribution="other", version="3", status="error", message="gone")

def broken():
    yield Finding(name="first", status="ok")
    raise OSError("no such device")

def odd():
    return ["all is well"]

def silent():
    return []

def quitter():
    raise SystemExit(3)
"""


def findings(install, body, number=1):
    """Of a registry that holds one plugin, without its other finding, `ok` for the module."""
    module = f"checked_hooks{number}"
    modules = {module: HOOKS.format(body=body), "checks_part": CHECKS}
    install(f"axlearn-plugins-checked{number}", "0.3", modules=modules, points={"plugins": {module: module}})
    names = Registry()
    modules_of_plugin = {module: names.claims["plugins"][module]}
    names.claims = {group: modules_of_plugin if group == "plugins" else {} for group in names.claims}
    first, *others = (f for f in examine(names) if f.group != "index")
    assert (first.name, first.group, first.status) == (module, "plugins", "ok")
    return [f for f in others if f.group != "distribution"]


def test_a_check_reports_what_it_finds(install):
    driver, fan, thing = findings(install, 'return ["checks_part:whole", "checks_part:foreign"]')
    assert (driver.name, driver.group, driver.status) == ("driver", "check", "ok")
    assert (fan.name, fan.group, fan.status, fan.message) == ("fan", "hardware", "warning", "slow")
    assert (fan.distribution, fan.version) == ("axlearn-plugins-checked1", "0.3")
    assert (thing.distribution, thing.version, thing.status) == ("other", "3", "error")


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("checks_part:broken", "OSError: no such device"),
        ("checks_part:odd", "TypeError: the check returned 'all is well', not a Finding"),
        ("checks_part:absent", "KeyError: 'absent'"),
        ("checks_part:quitter", "SystemExit: 3"),
        ("absent_part:check", "ModuleNotFoundError: No module named 'absent_part'"),
    ],
)
def test_a_check_that_fails_is_reported_and_the_others_go_on(install, check, expected):
    *_, error, driver, fan = findings(install, f'return ["{check}", "checks_part:silent", "checks_part:whole"]')
    assert (error.name, error.group, error.status) == (check, "check", "error")
    assert expected in error.message
    assert "checked_hooks1" in error.message
    assert (driver.name, fan.name) == ("driver", "fan")


def test_what_a_check_found_before_it_failed_is_reported(install):
    first, error = findings(install, 'return ["checks_part:broken"]')
    assert (first.name, first.status) == ("first", "ok")
    assert error.status == "error"


@pytest.mark.parametrize("body", ["raise OSError('no driver')", "return 3"])
def test_a_hook_that_fails_is_reported(install, body):
    (error,) = findings(install, body)
    assert (error.name, error.status) == ("checked_hooks1", "error")
    assert "has a hook that failed: axlearn_doctor_checks" in error.message


def test_a_failing_hook_of_kernels_does_not_end_the_doctor(install):
    body = "return []\n\n@hookimpl\ndef axlearn_kernels():\n    raise OSError('no driver')"
    (error,) = findings(install, body)
    assert "has a hook that failed: axlearn_kernels" in error.message


def test_a_run_listener_that_cannot_be_loaded_is_reported(install):
    """Its entry point loads: only a run would have met it."""
    body = 'return []\n\n@hookimpl\ndef axlearn_run_listeners():\n    return ["checks_part:whole", "checks_part:gone"]'
    (error,) = findings(install, body)
    assert (error.name, error.status) == ("checked_hooks1", "error")
    assert "has a run listener that cannot be created: checks_part:gone\n    cause: AttributeError" in error.message
