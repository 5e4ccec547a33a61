"""Count the bytes that a program moves to and from device memory, from its optimized module.

Each top-level instruction is assumed to read its operands and write its results once. Values inside a fusion stay on chip. A
slice counts only the bytes that it reads, even inside a nested fusion. An in-place update counts only the bytes that it writes.
Arrays in other memory spaces are not counted.
The real traffic may differ: a kernel may read an operand more than once, and a compiler may keep an operand on chip.
"""

from axlearn_plugins_plan.hlo import HBM, Computation, Instruction, Module

FREE = {
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "iota",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
"""Opcodes of instructions that move no data."""
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape")


def hbm_bytes(module: Module) -> float:
    """Return the bytes that one device reads from and writes to its memory in one step."""
    total = 0.0
    for computation, times in module.scheduled_computations():
        moved = sum(_bytes_moved(module, computation, i) for i in computation.instructions.values())
        total += times * moved
    return total


def _bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> float:
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(("-done", "-update")):
        return 0
    if opcode in ("fusion", "async-start") and instruction.computations.get("calls"):
        return _fusion_bytes(
            module, computation, instruction, module.computations[instruction.computations["calls"][0]]
        )
    if opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * _bytes_written(instruction)
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _size(computation, instruction.operands[1 if opcode == "dynamic-update-slice" else -1])
    read = sum(_size(computation, operand) for operand in dict.fromkeys(instruction.operands))
    if opcode.endswith("-start"):  # the result includes the operand
        return read + max(0.0, _bytes_written(instruction) - read)
    return read + _bytes_written(instruction)


def _bytes_written(instruction: Instruction) -> float:
    return sum(b.bytes for b in instruction.outputs if b.space == HBM)


def _size(computation: Computation, name: str) -> float:
    instruction = computation.instructions.get(name)
    return _bytes_written(instruction) if instruction is not None else 0


def _fusion_bytes(module: Module, computation: Computation, fusion: Instruction, body: Computation) -> float:
    """Return the bytes that a fusion moves.

    If an operand is only sliced, just its slices count. If a result is updated in place, only the update counts.
    """
    total = 0.0
    updated: set[str] = set()
    for result in _results(body):
        origin = _origin(body, result)
        if origin.opcode == "dynamic-update-slice":
            update = origin.operands[1]
            total += sum(b.bytes for b in body.instructions[update].outputs)
            updated.add(_origin(body, origin.operands[0]).name)
    total += sum(
        b.bytes
        for b, result in zip(fusion.outputs, _results(body), strict=False)
        if b.space == HBM and _origin(body, result).opcode != "dynamic-update-slice"
    )
    for index, operand in enumerate(fusion.operands):
        parameter = body.parameters.get(index)
        if parameter is None or parameter.name in updated:
            continue
        slices = _slices(module, body, parameter.name)
        size = _size(computation, operand)
        total += size if slices is None else min(size, slices)
    return total


def _results(body: Computation) -> tuple[str, ...]:
    root = body.root
    return root.operands if root.opcode == "tuple" else (root.name,)


def _origin(body: Computation, name: str) -> Instruction:
    instruction = body.instructions[name]
    while instruction.opcode in _TRANSPARENT and instruction.operands[0] in body.instructions:
        instruction = body.instructions[instruction.operands[0]]
    return instruction


def _slices(module: Module, body: Computation, name: str) -> float | None:
    """Return the bytes of all slices of a value, or None if any instruction reads the whole value."""
    total = 0.0
    for user in body.users.get(name, ()):
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += sum(b.bytes for b in user.outputs)
            continue
        below: float | None = None
        if user.opcode == "bitcast":
            below = _slices(module, body, user.name)
        elif user.opcode == "fusion":
            below = _slices_inside(module, user, name)
        if below is None:
            return None
        total += below
    return total


def _slices_inside(module: Module, fusion: Instruction, name: str) -> float | None:
    """Return the bytes of all slices of an operand inside a nested fusion, or None as in `_slices`."""
    inner, total = module.computations[fusion.computations["calls"][0]], 0.0
    for index in (i for i, operand in enumerate(fusion.operands) if operand == name):
        below = _slices(module, inner, inner.parameters[index].name) if index in inner.parameters else None
        if below is None:
            return None
        total += below
    return total
