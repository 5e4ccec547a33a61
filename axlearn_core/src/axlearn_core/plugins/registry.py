"""What is installed, by name: the entry points of the groups below.

Names come from metadata, so listing imports nothing; asking for a name imports that one object. Two distributions that
claim one name are an error that names both, never a matter of installation order.

`AXLEARN_PLUGINS` blocks by name: `-axlearn-plugins-foo,-features:moe` hides a distribution and one entry point.
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
from axlearn_core.plugins.index import entry_points, not_known
from axlearn_core.plugins.removed import replacement

if TYPE_CHECKING:
    from axlearn_core.config import Node
    from axlearn_core.plugins.feature import Feature

CORE = "axlearn-core"
BLOCK = "AXLEARN_PLUGINS"
Group = Literal["plugins", "components", "features", "experiments", "commands", "options", "functions", "launchers"]
GROUPS: tuple[Group, ...] = get_args(Group)


def normalized(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Entry:
    """One name that one distribution registers: `value` is `module:attribute`, not yet imported."""

    def __init__(self, group: Group, point: importlib_metadata.EntryPoint):
        self.group: Group = group
        self.name, self.value, self._dist = point.name, point.value, point.dist

    @functools.cached_property
    def distribution(self) -> str:
        """The name of the distribution."""
        return normalized(self._dist.name) if self._dist else "(no distribution)"

    @functools.cached_property
    def version(self) -> str:
        """The version of the distribution."""
        return self._dist.version if self._dist else "?"

    @property
    def origin(self) -> str:
        """`axlearn-plugins-rope 0.1.0`."""
        return f"{self.distribution} {self.version}"

    def __str__(self) -> str:
        return f"axlearn.{self.group} entry point {self.name!r} = {self.value} of {self.origin}"

    @functools.cached_property
    def core_range(self) -> str | None:
        """The versions of the core that the distribution works with (`<0.2,>=0.1`); None where it says nothing."""
        from packaging.requirements import Requirement  # only where something is loaded: listing stays fast

        requirements = [Requirement(r) for r in (self._dist.requires if self._dist else None) or ()]
        core_requirements = [
            r for r in requirements if normalized(r.name) == CORE and (not r.marker or r.marker.evaluate({"extra": ""}))
        ]
        return ",".join(str(r.specifier) for r in core_requirements) if core_requirements else None

    def incompatible(self, core_version: str) -> str | None:
        """Why the distribution does not work with this version of the core; None where it does."""
        from packaging.specifiers import SpecifierSet

        core_range = self.core_range
        if not core_range or SpecifierSet(core_range).contains(core_version, prereleases=True):
            return None
        return (
            f"{self.origin} works with {CORE} {core_range}, and {CORE} {core_version} is installed\n"
            f"    fix: install a version of {self.distribution} made for {CORE} {core_version}, or `{CORE}{core_range}`; "
            f"{BLOCK}=-{self.distribution} leaves it out"
        )

    def load(self) -> Any:
        """Imports the one object.

        Raises:
            PluginError: the distribution is for another version of the core, or the import fails.
        """
        if problem := self.incompatible(core_version()):
            raise PluginError(problem)
        module, _, attribute = self.value.partition(":")
        try:
            loaded = importlib.import_module(module.strip())
            return (
                functools.reduce(getattr, attribute.split("[")[0].strip().split("."), loaded) if attribute else loaded
            )
        except (Exception, SystemExit) as error:  # a plugin's module may raise anything; the cause is chained and shown
            raise self.failed("cannot be loaded", error) from error

    @property
    def remedy(self) -> str:
        """What a user can do if the distribution is broken: the last line of its errors."""
        out = f", or leave it out with {BLOCK}=-{self.distribution}" if self.distribution != CORE else ""
        return f"repair or upgrade {self.distribution}{out}"

    def failed(self, problem: str, error: BaseException) -> PluginError:
        """The error for this entry point, with its cause and where that was raised."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        frames = [f for f in frames if f.filename != __file__]
        at = f"\n    at: {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        removed = replacement(error)
        now = f"\n    removed: {removed[0]}\n    instead: {removed[1]}" if removed else ""
        stale = f"if its pyproject.toml changed, install {self.distribution} again; if not, "
        return PluginError(
            f"the {self} {problem}\n    cause: {type(error).__name__}: {error}{at}{now}\n"
            f"    fix: {stale if self._names_nothing(error) else ''}{self.remedy}"
        )

    def _names_nothing(self, error: BaseException) -> bool:
        """Whether the error says that the module or attribute of this entry point does not exist."""
        module = self.value.partition(":")[0].strip()
        if isinstance(error, ModuleNotFoundError):
            return f"{module}.".startswith(f"{error.name}.")
        return isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and error.obj.__name__ == module


@functools.cache
def core_version() -> str:
    """The version of the core that is installed."""
    return importlib_metadata.version(CORE)


class Registry:
    """The entry points that are installed and not blocked; also the `Names` by which configs go to files and back."""

    def __init__(self, block: str = ""):
        self.blocks = _parse_blocks(block)
        self.claims: dict[Group, dict[str, list[Entry]]] = {group: {} for group in GROUPS}
        self.blocked: list[Entry] = []
        # One distribution seen twice on sys.path (installed, and as a folder) counts once: the first one found.
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
        """What `AXLEARN_PLUGINS` names and nothing that is installed answers to."""
        used = {k for e in self.blocked for k in (e.distribution, e.name, f"{e.group}:{e.name}")}
        return sorted(self.blocks - used)

    def conflict(self, group: Group, name: str) -> PluginError | None:
        """The error for a name that more than one distribution claims."""
        claims = sorted(self.claims[group].get(name, ()), key=lambda e: e.distribution)
        if len(claims) < 2:
            return None
        lines = [f"{len(claims)} distributions register the {_singular(group)} {name!r}:"]
        lines += [f"    {e.origin}: {e.value}" for e in claims]
        lines.append(f"    fix: uninstall one of them, or leave one out: {BLOCK}=-{claims[-1].distribution}")
        return PluginError("\n".join(lines))

    def entries(self, group: Group) -> list[Entry]:
        """All entries of a group by name; raises `PluginError` where two distributions claim one name."""
        for name in self.claims[group]:
            if problem := self.conflict(group, name):
                raise problem
        return [self.claims[group][name][0] for name in sorted(self.claims[group])]

    def listed(self, group: Group) -> list[tuple[Entry, str]]:
        """All entries of a group by name, each with what is wrong with it: claimed twice, or for another core; else empty."""
        entries = []
        for name in sorted(self.claims[group]):
            claims = self.claims[group][name]
            for entry in claims:
                problem = "claimed twice" if len(claims) > 1 else "for another version of the core"
                wrong = len(claims) > 1 or entry.incompatible(core_version())
                entries.append((entry, problem if wrong else ""))
        return entries

    def entry(self, group: Group, name: str) -> Entry:
        """The entry of a name; raises `RequestError` with the nearest names, `PluginError` for a name claimed twice."""
        if problem := self.conflict(group, name):
            raise problem
        if name in self.claims[group]:
            return self.claims[group][name][0]
        for entry in self.blocked:
            if (entry.group, entry.name) == (group, name):
                raise RequestError(f"the {_singular(group)} {name!r} of {entry.origin} is blocked by {BLOCK}")
        if group == "components" and ":" in name:
            raise RequestError(
                f"{name} was not registered as a component when this config was written, and this process has not defined "
                "it, or has defined it otherwise\n"
                "    fix: run the Python code that defines it and read the config in the same process, or register it "
                'under [project.entry-points."axlearn.components"] and put its name in the file'
            )
        listing = {
            "components": "axlearn plugins list",
            "functions": "axlearn plugins list",
            "launchers": "axlearn plugins list",
            "options": "axlearn plugins list",
            "commands": "axlearn --help",
        }.get(group, f"axlearn {group} list")
        raise not_known(_singular(group), group, name, [*self.claims[group]], listing)

    def experiment(self, name: str) -> "Node[Any]":
        """The config of a named experiment."""
        from axlearn_core.config import Node

        entry = self.entry("experiments", name)
        function = entry.load()
        try:
            config = function()
        except AxlearnError:
            raise
        except Exception as error:  # an experiment is a plugin's function and may raise anything; the cause is shown
            raise entry.failed("failed", error) from error
        if not isinstance(config, Node):
            raise PluginError(f"the {entry} returned {type(config).__name__}, not a config node")
        return config

    def feature(self, name: str) -> "type[Feature]":
        """The class of a named feature; its fields are the options."""
        from axlearn_core.plugins.feature import Feature

        entry = self.entry("features", name)
        cls = entry.load()
        if not (isinstance(cls, type) and issubclass(cls, Feature) and cls is not Feature):
            raise PluginError(f"the {entry} is not a Feature class, it is {cls!r}")
        if "__attrs_attrs__" not in vars(cls):
            raise PluginError(f"the {entry} lacks @node")
        return cls

    def component(self, name: str) -> "type[Node[Any]]":
        """The config class of a component: the class's `Config`, the node class itself, or one from `configure`."""
        from axlearn_core.config.configured import configured_class
        from axlearn_core.config.tree import config_class

        entry = self.entry("components", name)
        target = entry.load()
        try:
            cls = config_class(target)
        except TypeError:
            if not callable(target):
                raise PluginError(f"the {entry} is not a class with a Config and cannot be called") from None
            cls = configured_class(target)
        self._names.setdefault(cls, entry.name)
        return cls

    def name_of(self, cls: type) -> str:
        """The registered name of a config class; raises `RequestError` that says how to register it."""
        if cls not in self._names:
            self._names[cls] = self._search(cls)
        name = self._names[cls]
        if isinstance(name, RequestError):
            raise name
        return name

    def shown_name(self, cls: type) -> str:
        """The registered name, or `module:Class`: showing a tree needs no registration."""
        try:
            return self.name_of(cls)
        except RequestError:
            from axlearn_core.config.flat import qualified_name

            return qualified_name(cls)

    def _search(self, cls: Any) -> str | RequestError:
        from axlearn_core.config.flat import qualified_name

        written = qualified_name(cls)
        # Where the class was defined, else where it may be exported from: what is imported, or is of the same package.
        ranked = []
        for name, (entry, *_) in self.claims["components"].items():
            module = entry.value.partition(":")[0]
            if entry.value == written or module in sys.modules or _top(module) == _top(written.partition(":")[0]):
                ranked.append((entry.value != written, module not in sys.modules, name))
        for elsewhere, _, name in sorted(ranked):
            try:
                if self.component(name) is cls:
                    return name
            except PluginError as error:
                if not elsewhere:
                    return error  # another component that cannot be loaded is not what was asked for
        extra = f" with interface {', '.join(cls.__interface__)}" if cls.__interface__ else ""
        return RequestError(
            f"{written}{extra} is not registered as a component, so it cannot be written to a file\n"
            f'    fix: add `a-name = "{written}"` to [project.entry-points."axlearn.components"] in the pyproject.toml '
            "of its distribution, and install that again"
        )


def _top(module: str) -> str:
    return module.partition(".")[0]


def _singular(group: str) -> str:
    return group.removesuffix("s")


def _parse_blocks(text: str) -> frozenset[str]:
    blocks = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        name = part[1:].strip()
        group, _, rest = name.rpartition(":")
        if not part.startswith("-") or not rest or (group and group not in GROUPS):
            raise RequestError(
                f"{BLOCK}={text!r}: {part!r} is not understood\n"
                "    expected: `-DISTRIBUTION`, `-NAME` or `-GROUP:NAME`, more of them after commas\n"
                f"    groups: {', '.join(GROUPS)}"
            )
        blocks |= {name, normalized(name)} if not group else {name}
    return frozenset(blocks)


def registry() -> Registry:
    """What is installed for this process. Read again when `sys.path` or `AXLEARN_PLUGINS` change."""
    return _registry(tuple(sys.path), os.environ.get(BLOCK, ""))


@functools.lru_cache(maxsize=1)
def _registry(path: Sequence[str], block: str) -> Registry:
    return Registry(block)
