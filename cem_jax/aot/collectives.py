"""What devices send each other in a compiled program: how often, how much, over which mesh axes.

Counted on one device, loops followed. `bytes` is the whole array that a collective is about: what
an all-gather makes, what a reduce-scatter or an all-reduce takes. `sent` is what a device sends of
it in a ring of n: (n−1)/n of an all-gather, a reduce-scatter or an all-to-all, twice that of an
all-reduce, all of a permutation.

Between slices of TPUs XLA writes a collective as a transfer to the host, which does it: such a
`send` says of which kind it is, and of a recv-done that waits for its result.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cem_jax.aot.hlo import Computation, Instruction, Program, array_bytes, runs

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_TRANSPOSED = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, ?device_ids=\(([^)]*(?:\([^)]*\))?)\))? ?\{([^}]*)\}")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
_WORK = ("fusion", "while", "custom-call", "convolution", "dot")  # worth waiting beside
_PIECES = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # of one that a TPU takes apart

Groups = tuple[tuple[int, ...], ...]  # numbers of the devices that exchange with each other


class Collective(NamedTuple):
    """One of the program's collectives."""

    kind: str
    axes: str  # of the mesh, joined by "+"; "other" where the groups are no axes
    groups: Groups
    times: int  # that a step runs it
    certain: bool  # False: `times` is too low, a loop around it could not be read
    bytes: int  # of one time
    sent: float  # of one time
    overlapped: bool  # it runs beside other instructions


def collectives(
    program: Program, mesh: Mapping[str, int], slices: Sequence[int] = ()
) -> list[Collective]:
    """All of a program, for a mesh of these axes and sizes.

    Args:
      slices: of each device, in the mesh's order, the slice it is in; none: there is but one.
    """
    axes = tuple(mesh.items())
    across = _across(slices)
    found = []
    for run in runs(program):
        pieces: dict[str, Collective] = {}
        found += (
            _between_slices(run.computation, instruction, axes, across)._replace(
                times=run.times, certain=run.certain
            )
            for instruction in run.computation.values()
            if instruction.opcode == "send" and _TRANSFER.search(instruction.attributes)
        )
        for where, instruction, overlapped, scattered in _within(program, run.computation, False):
            one = _collective(where, instruction, axes, scattered)
            one = one._replace(times=run.times, certain=run.certain, overlapped=overlapped)
            channel = re.search(r"channel_id=(\d+)", instruction.attributes)
            # a TPU runs one in pieces, each inside the fusion it shares the time with
            key = f"{channel[1]} {one.kind}" if channel and overlapped else instruction.name
            pieces.setdefault(key, one)
        found += pieces.values()
    return found


def totals(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Sums by kind, the most sent first: count, bytes, sent, overlapped (of those sent)."""
    kinds: dict[str, dict[str, float]] = {}
    for one in found:
        row = kinds.setdefault(one.kind, {"count": 0, "bytes": 0, "sent": 0, "overlapped": 0})
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
        row["sent"] += round(one.times * one.sent)
        row["overlapped"] += round(one.times * one.sent) if one.overlapped else 0
    return dict(sorted(kinds.items(), key=lambda item: -item[1]["sent"]))


def _within(
    program: Program, computation: Computation, overlapped: bool, scattered: bool = False
) -> Iterator[tuple[Computation, Instruction, bool, bool]]:
    """(where, collective, overlapped, scattered) of a computation and all that is fused into it."""
    in_pieces = any(
        f'custom_call_target="{piece}"' in i.attributes
        for i in computation.values()
        for piece in _PIECES
        if i.opcode == "custom-call"
    )
    for instruction in computation.values():
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in KINDS:
            alone = not opcode.endswith("-start") or '"is_sync":true' in instruction.attributes
            yield computation, instruction, overlapped or in_pieces or not alone, scattered
        elif opcode in ("fusion", "async-start"):
            name = instruction.called("calls")
            yield from _within(
                program,
                program.computations[name],
                overlapped or opcode == "async-start" or name.startswith("async_collective"),
                scattered or name.startswith("all-reduce-scatter"),
            )


def _collective(where, instruction, axes, scattered: bool) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    taken = sum(array_bytes(where[name].shape) for name in instruction.operands)
    if kind == "collective-permute":
        pairs = _listed(instruction.attributes, "source_target_pairs")
        groups = tuple(pair for pair in pairs if pair[0] != pair[1])
        return Collective(kind, _permuted(groups, axes), groups, 1, True, taken, taken, False)
    count = math.prod(size for _, size in axes)
    groups = _groups(instruction.attributes, count)
    if scattered and kind == "all-reduce":  # a TPU's fusion: each device keeps its slice only
        kind = "reduce-scatter"
    return _ring(kind, groups, axes, taken, False)


def _ring(kind: str, groups: Groups, axes, taken: int, overlapped: bool) -> Collective:
    n = len(groups[0])
    whole = taken * n if kind == "all-gather" else taken
    sent = whole * (n - 1) / n * (2 if kind == "all-reduce" else 1)
    return Collective(kind, _axes_of(groups, axes), groups, 1, True, whole, sent, overlapped)


def _across(slices: Sequence[int]) -> Groups:
    """The devices that have the same place in each slice."""
    members = [[i for i, s in enumerate(slices) if s == one] for one in sorted(set(slices))]
    return tuple(zip(*members, strict=True))


def _between_slices(where: Computation, send: Instruction, axes, groups: Groups) -> Collective:
    """A collective that hosts do; overlapped if there is work before its result is awaited."""
    kind = _TRANSFER.search(send.attributes)[1].lower().replace("_", "-")
    meeting = _RENDEZVOUS.search(send.attributes)[1]
    received = next(
        (i.name for i in where.values() if i.opcode == "recv" and f'"{meeting}"' in i.attributes),
        "",
    )
    names = list(where)
    ends = [names.index(i.name) for i in where.values() if received in i.operands]
    between = names[names.index(send.name) : max(ends, default=len(names))]
    overlapped = any(where[name].opcode in _WORK for name in between)
    taken = array_bytes(where[send.operands[0]].shape)
    return _ring(kind, groups, axes, taken, overlapped)


def _groups(attributes: str, count: int) -> Groups:
    """`replica_groups` in any of the forms that XLA writes."""
    text = attributes.partition("replica_groups=")[2]
    mesh = _MESH.match(text)
    if mesh:
        return _mesh_groups(*mesh.groups())
    iota = _IOTA.match(text)
    if iota:
        return _rows(_iota(iota[0]))
    return _listed(attributes, "replica_groups") or (tuple(range(count)),)


@functools.cache
def _mesh_groups(mesh: str, order: str | None, chosen: str) -> Groups:
    """Of `mesh['data'=2,'fsdp'=4] {'fsdp'}`; a part of an axis is `'fsdp':(before)size`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts: list[int] = []  # dimensions, those of partly used axes taken apart
    used: list[int] = []
    wanted = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    }
    for name, size in sizes.items():
        if name in wanted:
            before, middle = wanted[name]
            used.append(len(parts) + 1)
            parts += [before, middle, size // before // middle]
        else:
            parts.append(size)
    ids = _order(order) if order else np.arange(math.prod(parts))
    ids = np.moveaxis(ids.reshape(parts), used, range(-len(used), 0))
    return _rows(ids.reshape(-1, math.prod(parts[i] for i in used)))


def _order(text: str) -> np.ndarray:
    """Of `[4,2]T(1,0)`, all numbers in a shape and transposed; or of a list of them."""
    transposed = _TRANSPOSED.fullmatch(text)
    if not transposed:
        return np.array(_numbers(text))
    shape, order = map(_numbers, transposed.groups())
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def _iota(text: str) -> np.ndarray:
    shape, source, order = (_numbers(words or "") for words in _IOTA.match(text).groups())
    ids = np.arange(math.prod(source)).reshape(source)
    return (ids.transpose(order) if order else ids).reshape(shape)


def _numbers(words: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", words)]


def _listed(attributes: str, name: str) -> Groups:
    found = re.search(rf"{name}=\{{((?:\{{[\d,]*\}},?)*)\}}", attributes)
    rows = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    return tuple(tuple(int(n) for n in row.split(",")) for row in rows)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))


@functools.cache
def _axes_of(groups: Groups, axes: tuple[tuple[str, int], ...]) -> str:
    """The mesh axes along which the devices of a group differ, if these are all of them."""
    wanted = {frozenset(group) for group in groups}
    split = [i for i, (_, size) in enumerate(axes) if size > 1]
    ids = np.arange(math.prod(size for _, size in axes)).reshape([size for _, size in axes])
    for count in range(1, len(split) + 1):
        for chosen in itertools.combinations(split, count):
            size = math.prod(axes[i][1] for i in chosen)
            rows = np.moveaxis(ids, chosen, range(-count, 0)).reshape(-1, size)
            if {frozenset(row) for row in rows.tolist()} == wanted:
                return "+".join(axes[i][0] for i in chosen)
    return "none" if all(len(group) == 1 for group in groups) else "other"


def _permuted(pairs: Groups, axes: tuple[tuple[str, int], ...]) -> str:
    """The mesh axes along which a permutation's senders and receivers differ."""
    shape = [size for _, size in axes]
    differ = set()
    for pair in pairs:
        sender, receiver = (np.unravel_index(device, shape) for device in pair)
        differ |= {i for i, (a, b) in enumerate(zip(sender, receiver, strict=True)) if a != b}
    return "+".join(axes[i][0] for i in sorted(differ)) or "none"
