"""Configs with code that is not registered, such as a layer that is defined in a notebook.

In a file such a class or function is called `module:Class`, and `module:Class(param=offered name)` where `configure` was told
what its parent offers; a value that no file can hold is `<python code> module:name`. A file loads no code by such names: they
stand for what this process made a node of, or wrote, before.

Code of a notebook, and code within functions, can be defined again under the same name. Its name ends with a digest of it, so
that a run does not go on with other code.
"""

import hashlib
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from axlearn_core.config import Names, Node, patch, walk
from axlearn_core.config.flat import is_named, qualified_name
from axlearn_core.errors import ConfigError, PluginError, Problem, RequestError
from axlearn_core.plugins.decisions import Decision

MARK = "<python code> "
_VALUES: dict[str, Any] = {}  # what this process wrote


class CodeNames:
    """Registered names, and `module:Class` for what is not registered.

    Attributes:
        used: the names of code that were given out, in their order.
    """

    def __init__(self, names: Names):
        self.names = names
        self.used: dict[str, None] = {}

    def name_of(self, cls: type) -> str:
        """The registered name of a config class, else the name of its code."""
        try:
            return self.names.name_of(cls)
        except PluginError:
            raise
        except RequestError:
            self.used[code_name(cls)] = None
            return code_name(cls)

    def component(self, name: str) -> type[Node[Any]]:
        """The config class of a name; raises `RequestError` where nothing is registered or defined by it."""
        classes = [cls for cls in _node_classes(Node) if code_name(cls) == name] if ":" in name else []
        return classes[-1] if classes else self.names.component(name)  # a notebook's cell may have run twice

    def text_of(self, value: object) -> str:
        """How a value that no file can hold is written: by its code, or by what it prints."""
        text = MARK + (qualified_name(value) + _suffix(value) if is_named(value) else stable_repr(value))
        _VALUES[text] = value
        self.used[text] = None
        return text

    def decisions(self, config: Node[Any]) -> tuple[Decision, ...]:
        """The decision to write the config with names of code; empty where all that was written is registered."""
        if not self.used:
            return ()
        paths = {code_name(type(value)): path for path, value in reversed([*walk(config)]) if isinstance(value, Node)}
        subjects = ", ".join(f"{name} at {paths[name]}" if name in paths else name for name in self.used)
        reason = "the run's config file cannot be read without this code; register it as a component to load the run elsewhere"
        return (Decision("not registered", subjects, reason),)


def stable_repr(value: object) -> str:
    """`repr` without addresses in memory, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def code_name(cls: type[Node[Any]]) -> str:
    """`module:Class` of a config class, with what `configure` was told that its parent offers."""
    interface = ", ".join(cls.__interface__)
    return qualified_name(cls) + _suffix(cls.owner or cls) + (f"({interface})" if interface else "")


def _suffix(value: object) -> str:
    """`#` and a digest of a class or function that can be defined again under its name; empty for others."""
    module, _, name = qualified_name(value).partition(":")
    if not is_named(value) or (module != "__main__" and "<" not in name):
        return ""
    members = sorted(vars(value).items()) if isinstance(value, type) else [("", value)]
    sources = {name: _source(name, member) for name, member in members}
    text = " ".join(f"{name} {source}" for name, source in sources.items() if source)
    return f"#{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _source(name: str, member: object) -> str:
    """What a function, a method, a property or a constant computes with, as text that is equal in other processes."""
    function = member
    if isinstance(member, classmethod | staticmethod):
        function = member.__func__
    elif isinstance(member, property):
        function = member.fget
    if isinstance(function, FunctionType):
        defaults = function.__defaults__, sorted((function.__kwdefaults__ or {}).items())
        return f"{_code(function.__code__)} {stable_repr(defaults)} {[*map(_cell, function.__closure__ or ())]}"
    is_constant = isinstance(member, (str, int, float, tuple)) and not name.startswith("__")
    return stable_repr(member) if is_constant else ""


def _code(code: CodeType) -> str:
    constants = [_code(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _constant(value: object) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _cell(cell: Any) -> str:
    try:
        return stable_repr(cell.cell_contents)
    except ValueError:  # a name that is bound later
        return ""


def with_values(config: Node[Any]) -> Node[Any]:
    """A config that was read from a file, with the values that the file only names.

    Raises:
        ConfigError: this process did not write such a value.
    """
    texts = {path: text for path, text in walk(config) if isinstance(text, str) and text.startswith(MARK)}
    problems = [
        Problem(
            path=path,
            message="is a value of Python code, which the config file names and does not hold",
            got=text,
            fix="run the Python code that began the run, and read the config in the same process",
        )
        for path, text in texts.items()
        if text not in _VALUES
    ]
    if problems:
        raise ConfigError(problems)
    return patch(config, {path: _VALUES[text] for path, text in texts.items()}) if texts else config


def _node_classes(base: type) -> Iterator[Any]:
    for cls in base.__subclasses__():
        if "__attrs_attrs__" in vars(cls):  # attrs makes each class twice
            yield cls
        yield from _node_classes(cls)
