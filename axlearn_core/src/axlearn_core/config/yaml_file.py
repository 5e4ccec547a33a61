"""Read YAML 1.2 with ruamel.yaml: plain data with line numbers, and limits on the size of a document."""

from collections.abc import Mapping
from typing import Any

import attrs
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from axlearn_core.config.tree import join
from axlearn_core.errors import ConfigError, Problem

MAX_CHARACTERS = 1 << 20
MAX_VALUES = 25_000
MAX_DEPTH = 100


class _LimitExceeded(Exception):
    """A document exceeds a limit."""

    def __init__(self, got: str, expected: str, part: Any):
        super().__init__(got)
        self.got, self.expected, self.line = got, expected, part.start_mark.line + 1


class _Composer(Composer):
    """Enforces the limits while a document is parsed."""

    depth = count = 0
    warn_double_anchors = property(
        lambda self: False, lambda self, value: None
    )  # YAML 1.2 allows an anchor to be reused

    def compose_node(self, parent: object, index: object) -> Any:
        """Compose one node and everything below it."""
        self.depth += 1
        self.count += 1
        if self.depth > MAX_DEPTH:
            raise _LimitExceeded(f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}", self.parser.peek_event())
        if self.count > MAX_VALUES:
            raise _LimitExceeded(
                f"more than {MAX_VALUES:,} values", f"at most {MAX_VALUES:,}", self.parser.peek_event()
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _limit_problem(got: str, expected: str, location: str) -> Problem:
    return Problem(path="", message="is too large for a config", got=got, expected=expected, location=location)


@attrs.frozen
class Document:
    """A parsed YAML file: its data, and the line of every path, counted from 1."""

    data: Any
    lines: Mapping[str, int]
    source: str

    def locate(self, problem: Problem, prefix: str = "") -> Problem:
        """Add the file and line of a problem's path, or of its nearest parent in the file."""
        path = problem.path
        while path and join(prefix, path) not in self.lines:
            path = path.rpartition(".")[0]
        line = self.lines.get(join(prefix, path) if path else prefix)
        return attrs.evolve(problem, location=f"{self.source}:{line}" if line else self.source)


Part = ScalarNode | SequenceNode | MappingNode
"""A YAML node."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}


def parse(text: str, source: str = "<string>") -> Document:
    """Parse YAML 1.2 without tags or duplicate keys. Scalars follow the core schema: `1e-4` is a float, `no` a string.

    Raises:
        ConfigError: If the text is not valid YAML or exceeds a limit.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(_limit_problem(f"{len(text):,} characters", f"at most {MAX_CHARACTERS:,}", source))
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    reader = _Reader(yaml, source)
    try:
        root = yaml.compose(text)
        data = reader.read(root, "") if root is not None else None
    except _LimitExceeded as error:
        raise ConfigError(_limit_problem(error.got, error.expected, f"{source}:{error.line}")) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(Problem(path="", message=f"not valid YAML: {error.problem}", location=location)) from None
    except YAMLError as error:
        raise ConfigError(Problem(path="", message=f"not valid YAML: {error}", location=source)) from None
    if reader.problems:
        raise ConfigError(reader.problems)
    return Document(data, reader.lines, source)


@attrs.define(eq=False)
class _Reader:
    """Converts YAML nodes to plain data and collects problems and the line of each path."""

    yaml: YAML
    source: str
    count: int = 0
    lines: dict[str, int] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)

    def read(self, part: Part, path: str, line: int | None = None, above: tuple[Part, ...] = ()) -> Any:
        """Convert a YAML node. `above` contains its ancestors."""
        self.count += 1  # counts an alias each time it is used
        if self.count > MAX_VALUES or len(self.problems) > MAX_VALUES:
            raise _LimitExceeded(f"more than {MAX_VALUES:,} values, aliases expanded", f"at most {MAX_VALUES:,}", part)
        if len(above) > MAX_DEPTH:
            raise _LimitExceeded(f"more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}", part)
        self.lines[path] = line or part.start_mark.line + 1
        if any(part is p for p in above):
            return self._problem(path, "contains itself", part)
        if part.id == "scalar" and part.tag == _TAG + "timestamp":
            return part.value  # the core schema has no dates
        if part.id == "scalar" and part.tag in _SCALARS:
            return self._read_scalar(part, path)
        if part.id == "sequence":
            return [self.read(p, join(path, str(i)), None, (*above, part)) for i, p in enumerate(part.value)]
        if part.id != "mapping":
            return self._problem(path, f"the YAML tag {part.tag} is not allowed", part)
        return self._read_mapping(part, path, above)

    def _read_scalar(self, part: Part, path: str) -> Any:
        try:
            return self.yaml.constructor.construct_object(part)
        except (ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
            # The scalar does not match its explicit tag.
            kind = part.tag.removeprefix(_TAG)
            return self._problem(path, f"does not match the tag !!{kind}: {str(error).partition(';')[0]}", part)

    def _read_mapping(self, part: Part, path: str, above: tuple[Part, ...]) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key_part, value_part in part.value:
            if key_part.id != "scalar":
                self._problem(path, "a key must be a plain name", key_part)
                continue
            key = self.read(key_part, path, self.lines[path])
            key_path = join(path, str(key))
            if key in result:
                self._problem(key_path, "is a duplicate key", key_part)
            result[key] = self.read(value_part, key_path, key_part.start_mark.line + 1, (*above, part))
        return result

    def _problem(self, path: str, message: str, part: Part) -> None:
        self.problems.append(Problem(path=path, message=message, location=f"{self.source}:{part.start_mark.line + 1}"))
