"""Write and read configs that use code that is not registered, such as a layer defined in a notebook.

Config files refer to such a class or function as `module:Class`. If `configure` was called with interface names, the name is
`module:Class(param=offered name)`. A value that cannot be serialized is written as `<python code> module:name`. Reading a file
never imports code by these names. They only refer to classes and values that this process has already defined or written.

Code in a notebook or inside a function can be redefined under the same name. Its name therefore ends with a digest of the code,
so that a run does not resume with different code.
"""

import hashlib
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from axlearn_core.config import Names, Node, patch, walk
from axlearn_core.config.display import exact_repr
from axlearn_core.config.flat import is_named, qualified_name
from axlearn_core.errors import ConfigError, PluginError, Problem, RequestError
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import write

MARK = "<python code> "
_VALUES: dict[str, Any] = {}  # values that this process wrote, by name


class CodeNames:
    """Names for configs: registered names, and `module:Class` for code that is not registered.

    Attributes:
        code_names: Code names that have been returned so far, as ordered keys.
    """

    def __init__(self, names: Names):
        self.names = names
        self.code_names: dict[str, None] = {}

    def get_name(self, cls: type) -> str:
        """Return the registered name of a config class, or else the name of its code."""
        try:
            return self.names.get_name(cls)
        except PluginError:
            raise
        except RequestError:
            self.code_names[code_name(cls)] = None
            return code_name(cls)

    def component(self, name: str) -> type[Node[Any]]:
        """Return a config class by name. Raise `RequestError` if no such class is registered or defined."""
        classes = [cls for cls in _node_classes(Node) if code_name(cls) == name] if ":" in name else []
        return classes[-1] if classes else self.names.component(name)  # a notebook cell may have run twice

    def format_value(self, value: object) -> str:
        """Return the text for a value that cannot be serialized: the name of its code, or its repr."""
        text = MARK + (qualified_name(value) + _suffix(value) if is_named(value) else stable_repr(value))
        _VALUES[text] = value
        self.code_names[text] = None
        return text

    def decisions(self, config: Node[Any]) -> tuple[Decision, ...]:
        """Return the decision to write the config with code names. Empty if all written names are registered."""
        if not self.code_names:
            return ()
        paths = {code_name(type(value)): path for path, value in reversed([*walk(config)]) if isinstance(value, Node)}
        subjects = ", ".join(f"{name} at {paths[name]}" if name in paths else name for name in self.code_names)
        reason = "the config file of the run cannot be read without this code; register it as a component to load the run elsewhere"
        return (Decision("not registered", subjects, reason),)


def render(config: Node[Any]) -> str:
    """Return a config as YAML, with every value. `print(config)` shows only what differs from the defaults.

    The text is a config file, which `resolve` and `axlearn` can read. Code that is not registered can be read only in this
    process.
    """
    return write(config, CodeNames(registry()))


def stable_repr(value: object) -> str:
    """Return `repr(value)` without memory addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", exact_repr(value))


def code_name(cls: type[Node[Any]]) -> str:
    """Return `module:Class` for a config class, followed by the interface names that were passed to `configure`."""
    interface = ", ".join(cls.__interface__)
    return qualified_name(cls) + _suffix(cls.owner or cls) + (f"({interface})" if interface else "")


def _suffix(value: object) -> str:
    """Return `#` and a digest if a class or function can be redefined under its name, otherwise an empty string."""
    module, _, name = qualified_name(value).partition(":")
    if not is_named(value) or (module != "__main__" and "<" not in name):
        return ""
    members = sorted(vars(value).items()) if isinstance(value, type) else [("", value)]
    sources = {name: _source(name, member) for name, member in members}
    text = " ".join(f"{name} {source}" for name, source in sources.items() if source)
    return f"#{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _source(name: str, member: object) -> str:
    """Serialize the code of a function, method, property, or constant. The result is the same in all processes."""
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
    except ValueError:  # an empty cell: the variable is bound later
        return ""


def restore_values(config: Node[Any]) -> Node[Any]:
    """Replace the names of values with the values themselves, in a config that was read from a file.

    Raises:
        ConfigError: If this process did not write one of the values.
    """
    texts = {path: text for path, text in walk(config) if isinstance(text, str) and text.startswith(MARK)}
    problems = [
        Problem(
            path=path,
            message="is a Python value that the config file refers to but does not contain",
            got=text,
            fix="execute the Python code that started the run, and read the config in the same process",
        )
        for path, text in texts.items()
        if text not in _VALUES
    ]
    if problems:
        raise ConfigError(problems)
    return patch(config, {path: _VALUES[text] for path, text in texts.items()}) if texts else config


def _node_classes(base: type) -> Iterator[Any]:
    for cls in base.__subclasses__():
        if "__attrs_attrs__" in vars(cls):  # attrs creates each class twice; skip the undecorated copy
            yield cls
        yield from _node_classes(cls)
