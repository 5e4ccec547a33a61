"""Parse the text of an optimized XLA module: computations, instructions, buffer shapes and trip counts.

`compiled.as_text()` returns this text. XLA's `hlo_parser` defines its grammar (openxla.org/xla). The parser covers only the
parts that a plan needs.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import attrs

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .* \{$")
_COMMENT = re.compile(r"/\*.*?\*/")
_BUFFER = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_MESH = re.compile(r"mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? ?\{[^}]*\}")
_NAME = re.compile(r"%([\w.\-]+)")
HBM = 0
HOST = 5
"""Memory spaces in layouts, written `S(n)`. All other spaces are on-chip memories."""


@attrs.frozen
class Buffer:
    """An array as laid out in the module.

    Attributes:
        space: Memory space of the array. `HBM` if the layout does not name a space.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = HBM

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        return math.ceil(math.prod(self.dims) * bits(self.dtype) / 8)


def bits(dtype: str) -> int:
    """Return the bits per element of a dtype (`bf16`, `f8e4m3fn`, `s4`, `pred`), or 0 for tokens and opaque values."""
    if dtype == "pred":
        return 8
    match = re.match(r"(?:bf|[a-z])(\d+)", dtype)
    return int(match[1]) if match else 0


def buffers(shape: str) -> tuple[Buffer, ...]:
    """Parse the arrays in a shape. The arrays of a tuple are returned in order."""
    result = []
    for dtype, dims, layout in _BUFFER.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d)
        result.append(Buffer(dtype, sizes, int(space[1]) if space else HBM))
    return tuple(result)


@attrs.frozen(eq=False)
class Instruction:
    """An instruction.

    Attributes:
        shape: Text of the shape.
        operands: Names of the instructions whose values this instruction reads.
        rest: Text of the attributes.
        text: Text between the parentheses: the value of a constant or the index of a parameter.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    text: str
    root: bool

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        """Output arrays."""
        return buffers(self.shape)

    @cached_property
    def computations(self) -> Mapping[str, tuple[str, ...]]:
        """Attribute (`calls`, `body`, `condition`, `to_apply`, ...) -> names of computations."""
        return {key: tuple(n.strip(" %") for n in names.strip("{}").split(",")) for key, names in self._calls()}

    def _calls(self) -> Sequence[tuple[str, str]]:
        return _CALLED.findall(self.rest)

    def attribute(self, name: str) -> str | None:
        """Return the text after `name=`, including brackets, or None if there is no such attribute."""
        match = re.search(rf"(?:^|[ ,]){name}=", self.rest)
        if match is None:
            return None
        mesh = _MESH.match(self.rest, match.end())  # may contain a comma
        return mesh[0] if mesh else _balanced_text(self.rest, match.end())


@attrs.frozen(eq=False)
class Computation:
    """The instructions in one computation, by name, in text order."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction that computes the return value."""
        return next(i for i in self.instructions.values() if i.root)

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instruction name -> instructions that read it."""
        by_operand: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                by_operand.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in by_operand.items()}

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Index -> parameter instruction."""
        return {int(i.text): i for i in self.instructions.values() if i.opcode == "parameter"}


@attrs.frozen(eq=False)
class Module:
    """A parsed module.

    Attributes:
        entry: Name of the entry computation.
    """

    computations: Mapping[str, Computation]
    entry: str

    def scheduled_computations(self) -> Iterator[tuple[Computation, float]]:
        """Yield each scheduled computation (entry, loop bodies, branches) with its total number of executions.

        Excludes computations that fusions and asynchronous instructions call; see `inside`. Every branch counts as taken.
        """
        times: dict[str, float] = {self.entry: 1.0}
        for name in self._callers_first():
            if name not in times:
                continue
            for instruction in self.computations[name].instructions.values():
                for key, below in _bodies(instruction):
                    count = self.trips(instruction) if key in ("body", "condition") else 1
                    times[below] = times.get(below, 0.0) + times[name] * (count or 1)
        for name, count in times.items():
            yield self.computations[name], count

    def _callers_first(self) -> Sequence[str]:
        order: list[str] = []
        visited: set[str] = set()

        def visit(name: str) -> None:
            if name in visited:
                return
            visited.add(name)
            for instruction in self.computations[name].instructions.values():
                for _, below in _bodies(instruction):
                    visit(below)
            order.append(name)

        visit(self.entry)
        return order[::-1]

    def inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yield (computation, instruction) for an instruction, or for the body of a fusion or asynchronous start."""
        calling = ("to_apply",) if instruction.opcode == "call-start" else ("calls", "called_computations")
        names = [n for key in calling for n in instruction.computations.get(key, ())]
        for name in names:
            for below in self.computations[name].instructions.values():
                for inner, parent in self.inside(below):
                    yield self.computations[name] if parent is below else inner, parent
        if not names:
            yield next(iter(self.computations.values())), instruction

    def unknown_loops(self) -> list[str]:
        """Return the names of loops with an unknown trip count, whose bodies count once."""
        loops = [i for c, _ in self.scheduled_computations() for i in c.instructions.values() if i.opcode == "while"]
        return [loop.name for loop in loops if self.trips(loop) is None]

    def trips(self, loop: Instruction) -> int | None:
        """Return the trip count of a `while` loop from its annotation or its condition, or None if unknown."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
        if match:
            return int(match[1])
        condition = self.computations[loop.computations["condition"][0]]
        root = condition.root
        if root.opcode == "fusion" and root.computations.get("calls"):
            inner = self.computations[root.computations["calls"][0]]
            compared, arguments = inner.root, dict(enumerate(root.operands))
            sides = [self._constant(condition, inner, o, arguments) for o in compared.operands]
        else:
            compared = root
            sides = [self._constant(condition, condition, o, {}) for o in root.operands]
        if compared.opcode != "compare" or len(sides) != 2:
            return None
        # JAX lowers the loop condition of `scan` and `fori_loop` to `i < n`, where `i` starts at 0 and increases by 1.
        direction, (lower, right) = compared.attribute("direction"), sides
        if direction == "LT" and lower is None:
            return right
        return lower if direction == "GT" and right is None else None

    def _constant(self, outer: Computation, inner: Computation, name: str, arguments: Mapping[int, str]) -> int | None:
        instruction = inner.instructions[name]
        if instruction.opcode == "parameter" and arguments:
            instruction = outer.instructions[arguments[int(instruction.text)]]
        while instruction.opcode in ("copy", "bitcast", "convert") and instruction.operands[0] in outer.instructions:
            instruction = outer.instructions[instruction.operands[0]]
        return (
            int(instruction.text)
            if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.text)
            else None
        )


def _bodies(instruction: Instruction) -> Iterator[tuple[str, str]]:
    if instruction.opcode not in ("while", "conditional", "call"):
        return
    for key, names in instruction.computations.items():
        for name in names:
            yield key, name


def _balanced_text(text: str, start: int) -> str:
    """Return the text from `start` to the next comma outside brackets, or to the end."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        elif text[i] == "," and depth == 0:
            return text[start:i]
    return text[start:]


def _closing_index(text: str, start: int) -> int:
    """Return the index of the bracket that closes the bracket at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if depth == 0:
                return i
    return len(text)


def _instruction(line: str) -> Instruction | None:
    name, equals, rest = line.partition(" = ")
    if not equals:
        return None
    root = name.startswith("ROOT ")
    end = _closing_index(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    if not re.fullmatch(r"[a-z][\w\-]*", opcode):
        return None
    close = _closing_index(rest, len(opcode))
    inner = rest[len(opcode) + 1 : close]
    operands = () if opcode in ("constant", "parameter") else _operands(inner)
    return Instruction(
        name.removeprefix("ROOT ").lstrip("%"), shape, opcode, operands, rest[close + 1 :].lstrip(", "), inner, root
    )


def _operands(text: str) -> tuple[str, ...]:
    if "%" in text:
        return tuple(_NAME.findall(text))
    return tuple(part.split()[-1] for part in text.split(",") if part.strip() and part.strip()[-1] not in "})]")


def parse(text: str) -> Module:
    """Parse the text of a module.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, instructions = "", "", {}
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw).strip() if "/*" in raw else raw.strip()
        header = _HEADER.match(line) if not name else None
        if header:
            name, instructions = header[2], {}
            entry = name if header[1] else entry
        elif name and (line == "}" or line.startswith("}, execution_thread=")):
            computations[name] = Computation(name, instructions)
            name = ""
        elif name and (instruction := _instruction(line)):
            instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("the text has no ENTRY computation")
    return Module(computations, entry)
