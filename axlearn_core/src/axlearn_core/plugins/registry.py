"""The registry of installed entry points, by group and name.

Names are read from package metadata, so listing them does not import any plugin. Looking up a name imports only that object. If two
distributions register the same name, the lookup raises an error that lists both, so the order of installation does not matter.

The environment variable `AXLEARN_PLUGINS` blocks names: `-axlearn-plugins-foo,-features:moe` hides one distribution and one
entry point.
"""

import functools
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import importlib_metadata

from axlearn_core.errors import AxlearnError, PluginError, RequestError
from axlearn_core.plugins.index import entry_points, unknown_name_error
from axlearn_core.plugins.removed_names import find_replacement

if TYPE_CHECKING:
    from axlearn_core.config import Node
    from axlearn_core.plugins.feature import Feature

CORE = "axlearn-core"
BLOCK = "AXLEARN_PLUGINS"
Group = Literal[
    "plugins",
    "components",
    "features",
    "experiments",
    "commands",
    "options",
    "functions",
    "launchers",
    "properties",
    "reasoning_parsers",
    "report_sections",
    "tool_parsers",
]
GROUPS: tuple[Group, ...] = get_args(Group)


def normalize_name(name: str) -> str:
    """Normalize the name of a distribution as PyPI does."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Entry:
    """An entry point of a distribution. `value` is the `module:attribute` that `load` imports."""

    def __init__(self, group: Group, point: importlib_metadata.EntryPoint):
        self.group: Group = group
        self.name, self.value, self._dist = point.name, point.value, point.dist

    @functools.cached_property
    def distribution(self) -> str:
        """Normalized name of the distribution."""
        return normalize_name(self._dist.name) if self._dist else "(no distribution)"

    @functools.cached_property
    def version(self) -> str:
        """Version of the distribution."""
        return self._dist.version if self._dist else "?"

    @property
    def origin(self) -> str:
        """Name and version of the distribution, such as `axlearn-plugins-rope 0.1.0`."""
        return f"{self.distribution} {self.version}"

    def __str__(self) -> str:
        return f"axlearn.{self.group} entry point {self.name!r} = {self.value} of {self.origin}"

    @functools.cached_property
    def core_range(self) -> str | None:
        """Version range of the core that the distribution requires (`<0.2,>=0.1`), or None if it does not require the core."""
        from packaging.requirements import Requirement  # only loading needs it, so listing stays fast

        requirements = [Requirement(r) for r in (self._dist.requires if self._dist else None) or ()]
        core_requirements = [
            r
            for r in requirements
            if normalize_name(r.name) == CORE and (not r.marker or r.marker.evaluate({"extra": ""}))
        ]
        return ",".join(str(r.specifier) for r in core_requirements) if core_requirements else None

    def find_incompatibility(self, core_version: str) -> str | None:
        """Return an error message if the distribution does not support this version of the core, or None if it does."""
        from packaging.specifiers import SpecifierSet

        core_range = self.core_range
        if not core_range or SpecifierSet(core_range).contains(core_version, prereleases=True):
            return None
        return (
            f"{self.origin} requires {CORE} {core_range}, but {CORE} {core_version} is installed\n"
            f"    fix: install a version of {self.distribution} that supports {CORE} {core_version}, or install "
            f"`{CORE}{core_range}`; {BLOCK}=-{self.distribution} blocks it"
        )

    def load(self) -> Any:
        """Import and return the object.

        Raises:
            PluginError: If the distribution requires a different version of the core, or if the import fails.
        """
        if problem := self.find_incompatibility(core_version()):
            raise PluginError(problem)
        module, _, attribute = self.value.partition(":")
        try:
            loaded = importlib.import_module(module.strip())
            return (
                functools.reduce(getattr, attribute.split("[")[0].strip().split("."), loaded) if attribute else loaded
            )
        except (Exception, SystemExit) as error:  # a plugin module may raise any exception; the message includes it
            raise self.wrap_error("cannot be loaded", error) from error

    @property
    def remedy(self) -> str:
        """Advice for users when the distribution is broken. Errors end with it."""
        block = f", or block it with {BLOCK}=-{self.distribution}" if self.distribution != CORE else ""
        return f"repair or upgrade {self.distribution}{block}"

    def wrap_error(self, problem: str, error: BaseException) -> PluginError:
        """Return the error for a problem with this entry point, with the cause and the line that raised it."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        frames = [f for f in frames if f.filename != __file__]
        source = f"\n    at: {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        removed = find_replacement(error)
        advice = f"\n    removed: {removed[0]}\n    instead: {removed[1]}" if removed else ""
        reinstall = f"if its pyproject.toml changed, reinstall {self.distribution}; otherwise, "
        return PluginError(
            f"the {self} {problem}\n    cause: {type(error).__name__}: {error}{source}{advice}\n"
            f"    fix: {reinstall if self._is_dangling(error) else ''}{self.remedy}"
        )

    def _is_dangling(self, error: BaseException) -> bool:
        """Return True if the module or attribute of this entry point does not exist."""
        module = self.value.partition(":")[0].strip()
        if isinstance(error, ModuleNotFoundError):
            return f"{module}.".startswith(f"{error.name}.")
        return isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and error.obj.__name__ == module


@functools.cache
def core_version() -> str:
    """Return the installed version of the core."""
    return importlib_metadata.version(CORE)


class Registry:
    """The installed entry points, except blocked ones. It implements `Names`, which encodes and decodes configs."""

    def __init__(self, block: str = ""):
        self.blocks = _parse_blocks(block)
        self.claims: dict[Group, dict[str, list[Entry]]] = {group: {} for group in GROUPS}
        self.blocked: list[Entry] = []
        # A distribution that is on sys.path twice (installed and as a source folder) counts once; the first one takes precedence.
        for point in entry_points():
            group = point.group.removeprefix("axlearn.")
            if point.group.startswith("axlearn.") and group in GROUPS:
                entry = Entry(group, point)
                if self.blocks and self._is_blocked(entry):
                    self.blocked.append(entry)
                else:
                    self.claims[group].setdefault(entry.name, []).append(entry)
        self._names: dict[type, str | RequestError] = {}

    def _is_blocked(self, entry: Entry) -> bool:
        return bool(self.blocks & {entry.distribution, entry.name, f"{entry.group}:{entry.name}"})

    def unused_blocks(self) -> list[str]:
        """Return the names in `AXLEARN_PLUGINS` that match no installed entry point."""
        matched = {k for e in self.blocked for k in (e.distribution, e.name, f"{e.group}:{e.name}")}
        return sorted(self.blocks - matched)

    def conflict(self, group: Group, name: str) -> PluginError | None:
        """Return the error for a name that several distributions register, or None if there is no conflict."""
        claims = sorted(self.claims[group].get(name, ()), key=lambda e: e.distribution)
        if len(claims) < 2:
            return None
        lines = [f"{len(claims)} distributions register the {singular(group)} {name!r}:"]
        lines += [f"    {e.origin}: {e.value}" for e in claims]
        lines.append(f"    fix: uninstall one of them, or block one: {BLOCK}=-{claims[-1].distribution}")
        return PluginError("\n".join(lines))

    def entries(self, group: Group) -> list[Entry]:
        """Return all entries of a group, sorted by name. Raise `PluginError` if two distributions register the same name."""
        for name in self.claims[group]:
            if problem := self.conflict(group, name):
                raise problem
        return [self.claims[group][name][0] for name in sorted(self.claims[group])]

    def list_entries(self, group: Group) -> list[tuple[Entry, str]]:
        """Return all entries of a group and their problems, sorted by name.

        Returns:
            (entry, problem) pairs. The problem is empty if the entry is usable.
        """
        entries = []
        for name in sorted(self.claims[group]):
            claims = self.claims[group][name]
            for entry in claims:
                problem = (
                    f"registered by {len(claims)} distributions"
                    if len(claims) > 1
                    else "requires a different version of the core"
                )
                wrong = len(claims) > 1 or entry.find_incompatibility(core_version())
                entries.append((entry, problem if wrong else ""))
        return entries

    def entry(self, group: Group, name: str) -> Entry:
        """Return an entry by name.

        Raises:
            RequestError: If the name is unknown or blocked. The message suggests the nearest names.
            PluginError: If several distributions register the name.
        """
        if problem := self.conflict(group, name):
            raise problem
        if name in self.claims[group]:
            return self.claims[group][name][0]
        for entry in self.blocked:
            if (entry.group, entry.name) == (group, name):
                raise RequestError(
                    f"the {singular(group)} {name!r} of {entry.origin} is blocked by {BLOCK}\n    fix: remove it from {BLOCK}"
                )
        if group == "components" and ":" in name:
            raise RequestError(
                f"{name} was not registered as a component when this config was written, and this process has not defined "
                "it, or its definition has changed\n"
                "    fix: execute the Python code that defines it and read the config in the same process, or register it "
                'in [project.entry-points."axlearn.components"] and write its registered name to the file'
            )
        listing = {
            "components": "axlearn plugins list",
            "functions": "axlearn plugins list",
            "launchers": "axlearn plugins list",
            "options": "axlearn plugins list",
            "properties": "axlearn plugins list",
            "reasoning_parsers": "axlearn plugins list",
            "report_sections": "axlearn plugins list",
            "tool_parsers": "axlearn plugins list",
            "commands": "axlearn --help",
        }.get(group, f"axlearn {group} list")
        raise unknown_name_error(singular(group), group, name, [*self.claims[group]], listing)

    def experiment(self, name: str) -> "Node[Any]":
        """Return the config of an experiment by name. If the root config has a name field, set it to the name."""
        from axlearn_core.config import Node
        from axlearn_core.contracts.experiment import set_experiment_name

        entry = self.entry("experiments", name)
        function = entry.load()
        try:
            config = function()
        except AxlearnError:
            raise
        except Exception as error:  # an experiment is plugin code and may raise any exception
            raise entry.wrap_error("failed", error) from error
        if not isinstance(config, Node):
            raise PluginError(f"the {entry} returned {type(config).__name__}, not a config node")
        return set_experiment_name(config, name)

    def feature(self, name: str) -> "type[Feature]":
        """Return the class of a feature by name. Its fields are the options."""
        from axlearn_core.plugins.feature import Feature

        entry = self.entry("features", name)
        cls = entry.load()
        if not (isinstance(cls, type) and issubclass(cls, Feature) and cls is not Feature):
            raise PluginError(f"the {entry} is {cls!r}, not a Feature class")
        if "__attrs_attrs__" not in vars(cls):
            raise PluginError(f"the {entry} is missing the @node decorator")
        return cls

    def component(self, name: str) -> "type[Node[Any]]":
        """Return the config class of a component: the `Config` of a class, a node class, or the result of `configure`."""
        from axlearn_core.config.callable_node import configured_class
        from axlearn_core.config.tree import config_class

        entry = self.entry("components", name)
        target = entry.load()
        try:
            cls = config_class(target)
        except TypeError:
            if not callable(target):
                raise PluginError(f"the {entry} is neither a class with a Config nor callable") from None
            cls = configured_class(target)
        self._names.setdefault(cls, entry.name)
        return cls

    def get_name(self, cls: type) -> str:
        """Return the registered name of a config class. Raise `RequestError` if it is not registered."""
        if cls not in self._names:
            self._names[cls] = self._find_name(cls)
        name = self._names[cls]
        if isinstance(name, RequestError):
            raise name
        return name

    def display_name(self, cls: type) -> str:
        """Return the registered name of a config class, or `module:Class` if it is not registered."""
        try:
            return self.get_name(cls)
        except RequestError:
            from axlearn_core.config.flat import qualified_name

            return qualified_name(cls)

    def _find_name(self, cls: Any) -> str | RequestError:
        from axlearn_core.config.flat import qualified_name

        qualified = qualified_name(cls)
        # Try the entry that defines the class first. Other entries may export it: try those of imported modules and of the
        # same package.
        ranked = []
        for name, (entry, *_) in self.claims["components"].items():
            module = entry.value.partition(":")[0]
            same_package = _top_package(module) == _top_package(qualified)
            if entry.value == qualified or module in sys.modules or same_package:
                ranked.append((entry.value != qualified, module not in sys.modules, name))
        for is_export, _, name in sorted(ranked):
            try:
                if self.component(name) is cls:
                    return name
            except PluginError as error:
                if not is_export:
                    return error  # ignore other components that cannot be loaded
        extra = f" with interface {', '.join(cls.__interface__)}" if cls.__interface__ else ""
        return RequestError(
            f"{qualified}{extra} is not registered as a component, so it cannot be written to a file\n"
            f'    fix: add `a-name = "{qualified}"` to [project.entry-points."axlearn.components"] in the pyproject.toml '
            "of its distribution, and reinstall the distribution"
        )


def _top_package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def singular(group: str) -> str:
    """Return the name of one entry of a group, such as `tool parser`."""
    name = group.replace("_", " ")
    return name.removesuffix("ies") + "y" if name.endswith("ies") else name.removesuffix("s")


def _parse_blocks(text: str) -> frozenset[str]:
    blocks = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        name = part[1:].strip()
        group, _, target = name.rpartition(":")
        if not part.startswith("-") or not target or (group and group not in GROUPS):
            raise RequestError(
                f"{BLOCK}={text!r}: {part!r} is invalid\n"
                "    expected: `-DISTRIBUTION`, `-NAME` or `-GROUP:NAME`, separated by commas\n"
                f"    groups: {', '.join(GROUPS)}"
            )
        blocks |= {name, normalize_name(name)} if not group else {name}
    return frozenset(blocks)


def registry() -> Registry:
    """Return the registry of this process. It is cached until `sys.path` or `AXLEARN_PLUGINS` changes."""
    return _registry(tuple(sys.path), os.environ.get(BLOCK, ""))


@functools.lru_cache(maxsize=1)
def _registry(path: Sequence[str], block: str) -> Registry:
    return Registry(block)
