"""Load each installed entry point and report errors."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import attrs
import pluggy

from axlearn_core.cli.extensible import check_command, check_option
from axlearn_core.contracts.finding import Finding
from axlearn_core.errors import RequestError, nearest
from axlearn_core.plugins import hookspecs
from axlearn_core.plugins.index import Index, indexes
from axlearn_core.plugins.manager import register
from axlearn_core.plugins.registry import BLOCK, CORE, GROUPS, Entry, Group, Registry, core_version
from axlearn_core.plugins.removed_names import HOOKS
from axlearn_core.plugins.targets import load


def examine(names: Registry) -> Iterator[Finding]:
    """Yield a finding for each entry point and index, and the findings of the plugins' checks.

    Also yields a finding for each distribution that declares no supported core version, for each blocked entry point,
    and for each block that has no effect.

    Args:
        names: Registry of the installed names.
    """
    manager = pluggy.PluginManager("axlearn")
    manager.add_hookspecs(hookspecs)
    loaders: dict[Group, Callable[[Entry], Any]] = {
        "plugins": lambda entry: register(manager, entry),
        "commands": check_command,
        "options": check_option,
        "functions": lambda entry: entry.load(),
        "launchers": lambda entry: entry.load(),
        "properties": lambda entry: entry.load(),
        "reasoning_parsers": lambda entry: entry.load(),
        "report_sections": lambda entry: entry.load(),
        "tool_parsers": lambda entry: entry.load(),
        "features": lambda entry: names.feature(entry.name),
        "experiments": lambda entry: names.experiment(entry.name),
        "components": lambda entry: names.component(entry.name),
    }
    unstated: dict[str, Entry] = {}
    for group in sorted(GROUPS, key=list(loaders).index):  # hook modules first, before anything imports JAX
        for name in sorted(names.claims[group]):
            claims = names.claims[group][name]
            for entry in claims:
                if entry.distribution != CORE and entry.core_range is None:
                    unstated.setdefault(entry.distribution, entry)
            if problem := names.conflict(group, name):
                yield from (_finding(entry, "error", str(problem)) for entry in claims)
            else:
                yield _load_finding(claims[0], loaders[group])
                if group == "features":
                    yield from _find_misspelled_names(claims[0], names)
                if group == "plugins":
                    yield from _find_unmarked_hooks(claims[0])
    modules = [
        claims[0] for name, claims in sorted(names.claims["plugins"].items()) if not names.conflict("plugins", name)
    ]
    for entry in modules:  # last, because ops import JAX
        yield from _find_unknown_ops(manager, entry)
        yield from _find_missing_listeners(manager, entry)
    for entry in modules:
        yield from _run_checks(manager, entry)
    yield from examine_indexes()
    for entry in unstated.values():
        message = (
            f"does not declare a supported version of {CORE}; fix: add `{CORE}>={core_version()}` to its dependencies"
        )
        yield attrs.evolve(_finding(entry, "warning", message), name=entry.distribution, group="distribution")
    for entry in names.blocked:
        yield _finding(entry, "blocked", f"by {BLOCK}")
    for name in names.unused_blocks():
        message = f"{BLOCK} blocks this name, but no installed package defines it"
        yield Finding(name=name, group=BLOCK, distribution="", version="", status="warning", message=message)


def examine_indexes() -> Iterator[Finding]:
    """Yield a finding for each index of names, and a warning for each conflict.

    Two indexes conflict if they assign the same name to different distributions.
    """
    owners: dict[tuple[str, str], tuple[str, Index]] = {}
    for index in indexes():
        distribution, version = index.origin
        finding = Finding(name=index.name, group="index", distribution=distribution, version=version, status="ok")
        yield attrs.evolve(finding, status="warning", message=index.problem) if index.problem else finding
        for group, name, package in ((g, n, p) for g, names in index.names.items() for n, p in names.items()):
            first, owner = owners.setdefault((group, name), (package, index))
            if first != package:
                other = f"{owner.name} of {owner.origin[0]} assigns it to {first} and takes precedence"
                message = f"{group}: assigns {name!r} to {package}, but {other}"
                yield attrs.evolve(finding, status="warning", message=message)


def _find_unmarked_hooks(entry: Entry) -> Iterator[Finding]:
    """Yield an error for each function that looks like a hook but lacks `@hookimpl`."""
    try:
        module = vars(entry.load())
    except RequestError:  # already reported
        return
    hooks = [name for name in vars(hookspecs) if name.startswith("axlearn_")]
    for name, value in module.items():
        is_local = inspect.isfunction(value) and value.__module__ == module.get("__name__")
        if not is_local or not name.startswith("axlearn_") or "axlearn_impl" in vars(value):
            continue
        if name in HOOKS:
            yield _finding(entry, "error", f"the hook {name} was removed\n    instead: {HOOKS[name]}")
            continue
        names = [name] if name in hooks else list(nearest(name, hooks, limit=1))
        hint = f"; did you mean: {names[0]}?" if names and names[0] != name else ""
        message = f"the function {name} lacks @hookimpl, so it is never called{hint}"
        yield _finding(entry, "error", message)


def _find_unknown_ops(manager: pluggy.PluginManager, entry: Entry) -> Iterator[Finding]:
    """Yield an error for each kernel whose op does not exist. Such a kernel never runs.

    Skips packages that are not installed.
    """
    kernels, failures = _hook_answers(manager.hook.axlearn_kernels, entry)
    yield from failures
    for kernel in kernels:
        module_name, _, cls = kernel.op.partition(":")
        if importlib.util.find_spec(module_name.split(".")[0]) is None:
            continue
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            yield _finding(
                entry, "error", f"the op {kernel.op} of the kernel {kernel.name!r} cannot be imported: {error}"
            )
            continue
        if cls not in vars(module):
            close = nearest(cls, [*vars(module)], limit=1)
            hint = f"; did you mean: {module_name}:{close[0]}?" if close else ""
            message = f"the op {kernel.op} of the kernel {kernel.name!r} does not exist, so the kernel never runs{hint}"
            yield _finding(entry, "error", message)


def _find_missing_listeners(manager: pluggy.PluginManager, entry: Entry) -> Iterator[Finding]:
    """Yield an error for each run listener that cannot be loaded. Such a listener would make every run fail."""
    locations, failures = _hook_answers(manager.hook.axlearn_run_listeners, entry)
    yield from failures
    for location in locations:
        try:
            load(location)
        except (Exception, SystemExit) as error:  # a plugin's module may raise anything
            yield _finding(
                entry, "error", str(entry.wrap_error(f"has a run listener that cannot be created: {location}", error))
            )


def _run_checks(manager: pluggy.PluginManager, entry: Entry) -> Iterator[Finding]:
    """Yield the findings of a plugin's own checks.

    If a check raises, yields an error and runs the remaining checks.
    """
    locations, failures = _hook_answers(manager.hook.axlearn_doctor_checks, entry)
    yield from failures
    for location in locations:
        try:
            module, _, function = location.partition(":")
            for finding in vars(importlib.import_module(module))[function]():
                if not isinstance(finding, Finding):
                    raise TypeError(f"the check returned {finding!r}, not a Finding")
                owner = {} if finding.distribution else {"distribution": entry.distribution, "version": entry.version}
                yield attrs.evolve(finding, **owner)
        except (Exception, SystemExit) as error:  # a plugin's check may raise anything
            message = str(entry.wrap_error(f"has a check that failed: {location}", error))
            yield attrs.evolve(_finding(entry, "error", message), name=str(location), group="check")


def _hook_answers(caller: pluggy.HookCaller, entry: Entry) -> tuple[list[Any], list[Finding]]:
    """Return the values that a plugin returns for a hook, and its errors as findings."""
    answers: list[Any] = []
    failures = []
    for implementation in caller.get_hookimpls():
        if implementation.plugin_name == entry.name:
            try:
                answers += cast("Iterable[Any]", implementation.function())
            except (Exception, SystemExit) as error:  # a plugin's hook may raise anything
                problem = str(entry.wrap_error(f"has a hook that failed: {caller.name}", error))
                failures.append(_finding(entry, "error", problem))
    return answers, failures


def _find_misspelled_names(entry: Entry, names: Registry) -> Iterator[Finding]:
    """Yield a warning for each misspelled feature name in `before` or `after`.

    A name counts as misspelled if it is not installed but is close to the name of an installed feature.
    """
    try:
        cls = names.feature(entry.name)
    except RequestError:  # already reported
        return
    for name in (*cls.before, *cls.after):
        close = nearest(name, names.claims["features"], limit=1)
        if name not in names.claims["features"] and close:
            message = f"`before` or `after` names {name!r}, which is not installed; did you mean: {close[0]}?"
            yield _finding(entry, "warning", message)


def _load_finding(entry: Entry, load: Callable[[Entry], Any]) -> Finding:
    before = "jax" in sys.modules
    try:
        load(entry)
    except RequestError as error:
        return _finding(entry, "error", str(error))
    if entry.group == "plugins" and not before and "jax" in sys.modules:
        message = (
            "the module imports jax, which slows down every command; return `module:name` locations from the hooks"
        )
        return _finding(entry, "warning", message)
    return _finding(entry, "ok", "")


def _finding(entry: Entry, status: str, message: str) -> Finding:
    return Finding(
        name=entry.name,
        group=entry.group,
        distribution=entry.distribution,
        version=entry.version,
        status=status,
        message=message,
    )
