"""Parse a compiled program: its computations, how often each runs, the sizes of its arrays.

XLA's own cost analysis counts the body of a loop once, however often it runs. Here every iteration
counts, so that work in every layer and microbatch is counted as often as it is done.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")  # a memory space other than the device's main memory
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BITS = re.compile(r"\d+")
_PASSED_ON = ("copy", "bitcast", "convert")


class Instruction(NamedTuple):
    """An instruction. `shape` is text, in parentheses for a tuple; `operands` are names."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    argument: str  # text in the parentheses: a constant's value, a parameter's number
    attributes: str
    root: bool

    def called(self, attribute: str) -> str | None:
        """Return the computation named by `attribute=%name`."""
        found = re.search(rf"\b{attribute}=%?([\w.-]+)", self.attributes)
        return found and found[1]


Computation = dict[str, Instruction]


class Program(NamedTuple):
    """Computations by name, instructions in schedule order; `entry` is the one that is run."""

    computations: dict[str, Computation]
    entry: str


class Run(NamedTuple):
    """A computation and its runs per step; `certain` is False if a trip count is unknown."""

    computation: Computation
    times: int
    certain: bool


def parse(text: str) -> Program:
    """Parse `jax.stages.Compiled.as_text()`. Raises ValueError if it has no entry."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = computations[header[2]] = {}
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text of the compiled program has no ENTRY computation")
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    named = _NAMED.match(line)
    if not named:
        return None
    rest = line[named.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 0:
        return None
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    return Instruction(
        named[2], shape, rest[:opening], operands, inside, rest[closing + 1 :], bool(named[1])
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


@functools.cache
def array_bytes(shape: str, *, main_memory: bool = False) -> int:
    """Return the bytes of all arrays in a shape, without padding.

    `main_memory`: exclude arrays that the compiler keeps elsewhere, such as in a TPU's VMEM.
    """
    total = 0
    for dtype, dims, layout in _ARRAY.findall(shape):
        if main_memory and _ELSEWHERE.search(layout):
            continue
        total += math.ceil(math.prod(int(n) for n in dims.split(",") if n) * _bits(dtype) / 8)
    return total


def _bits(dtype: str) -> int:
    if dtype in ("pred", "token", "opaque"):
        return 8 if dtype == "pred" else 0
    width = _BITS.search(dtype)
    return int(width[0]) if width else 0


def root(computation: Computation) -> Instruction:
    """Return the instruction whose value the computation returns."""
    return next(i for i in computation.values() if i.root)


def runs(program: Program) -> Iterator[Run]:
    """Yield every computation that is run by itself, not fused into an instruction.

    A computation that is called in several places is yielded several times. All branches of a
    conditional count, which is too many.
    """
    yield from _runs(program, program.entry, 1, True)


def _runs(program: Program, name: str, times: int, certain: bool) -> Iterator[Run]:
    computation = program.computations[name]
    yield Run(computation, times, certain)
    for instruction in computation.values():
        if instruction.opcode == "while":
            trips = trip_count(program, computation, instruction)
            body = instruction.called("body")
            yield from _runs(program, body, times * (trips or 1), certain and trips is not None)
        elif instruction.opcode == "call":
            yield from _runs(program, instruction.called("to_apply"), times, certain)
        elif instruction.opcode == "conditional":
            for branch in _branches(instruction):
                yield from _runs(program, branch, times, certain)


def _branches(instruction: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if listed:
        return re.findall(r"%?([\w.-]+)", listed[1])
    pair = (instruction.called(f"{which}_computation") for which in ("true", "false"))
    return [name for name in pair if name]


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Return a loop's trip count: as XLA notes it, or from `counter < constant`, from 0."""
    noted = _KNOWN_TRIPS.search(loop.attributes)
    if noted:
        return int(noted[1])
    condition = program.computations[loop.called("condition")]
    test = root(condition)
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, limit = (_source(condition, name) for name in test.operands)
    index = re.search(r"\bindex=(\d+)", counter.attributes)
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant" or not index:
        return None
    start = _source(computation, loop.operands[0])
    if start.opcode != "tuple":
        return None
    first = _source(computation, start.operands[int(index[1])])
    from_zero = first.opcode == "constant" and first.argument == "0"
    return int(limit.argument) if from_zero else None


def _source(computation: Computation, name: str) -> Instruction:
    instruction = computation[name]
    while instruction.opcode in _PASSED_ON:
        instruction = computation[instruction.operands[0]]
    return instruction
