"""Bytes that a compiled program moves between a device's main memory and its processor.

Each instruction reads its operands and writes its result once; a fusion is one instruction. If an
array is only sliced, or updated in place, only the slice counts, so a loop over stacked layers
reads each layer once. Caches are ignored, and what a kernel reads twice counts once.
"""

from cem_jax.aot.hlo import (
    Computation,
    Instruction,
    Program,
    array_bytes,
    root,
    runs,
)

# These move nothing themselves; the work behind them is counted where it happens.
_FREE = {
    "after-all",
    "async-done",
    "async-start",
    "async-update",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
_SLICES = ("dynamic-slice", "slice", "gather")
_RENAMES = ("bitcast", "get-tuple-element")


def bytes_moved(program: Program) -> int:
    """Return the bytes read and written per device in one run, counting all loop iterations."""
    return sum(
        run.times * _moved(program, run.computation, instruction)
        for run in runs(program)
        for instruction in run.computation.values()
    )


def _moved(program: Program, computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    read = sum(
        _read(program, _size(computation[name]), instruction, position)
        for position, name in enumerate(instruction.operands)
        if name in computation
    )
    return read + _written(program, computation, instruction)


def _size(instruction: Instruction) -> int:
    return array_bytes(instruction.shape, main_memory=True)


def _read(program: Program, whole: int, user: Instruction, position: int) -> int:
    """Return the bytes that an instruction reads of one operand of `whole` bytes."""
    opcode = user.opcode.removesuffix("-start")
    if position == 0 and opcode in _SLICES:
        # an async start includes its operand in the result
        own = array_bytes(user.shape) - (whole if opcode != user.opcode else 0)
        return min(whole, max(0, own))
    if position == 0 and user.opcode == "dynamic-update-slice":
        return 0
    if user.opcode == "fusion":
        fused = program.computations[user.called("calls")]
        return min(whole, _read_inside(program, fused, _parameter(fused, position)))
    return whole


def _parameter(computation: Computation, number: int) -> Instruction:
    return next(
        i for i in computation.values() if i.opcode == "parameter" and i.argument == str(number)
    )


def _read_inside(program: Program, fused: Computation, value: Instruction) -> int:
    """Return the bytes of a fusion's parameter, or an alias of it, that its users read."""
    whole, total = array_bytes(value.shape), 0
    for user in fused.values():
        for position, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.opcode in _RENAMES:
                total += _read_inside(program, fused, user)
            else:
                total += _read(program, whole, user, position)
    return total


def _written(program: Program, computation: Computation, instruction: Instruction) -> int:
    whole = _size(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return min(whole, _size(computation[instruction.operands[1]]))
    if instruction.opcode == "fusion":
        fused = program.computations[instruction.called("calls")]
        return min(whole, _written_inside(program, fused, root(fused)))
    if instruction.opcode.endswith("-start"):  # whose result includes the operands
        return max(0, whole - sum(_size(computation[name]) for name in instruction.operands))
    return whole


def _written_inside(program: Program, fused: Computation, value: Instruction) -> int:
    if value.opcode == "parameter":
        return 0
    if value.opcode == "tuple":
        return sum(_written_inside(program, fused, fused[name]) for name in value.operands)
    if value.opcode == "bitcast":
        return _written_inside(program, fused, fused[value.operands[0]])
    if value.opcode == "dynamic-update-slice":
        return _size(fused[value.operands[1]])
    if value.opcode == "fusion":
        inner = program.computations[value.called("calls")]
        return _written_inside(program, inner, root(inner))
    return _size(value)
