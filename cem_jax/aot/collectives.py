"""Collectives of a compiled program: how often they run, how much they send, over which mesh axes.

Counts are per device, and include loop iterations. `bytes` is the size of the whole array: the
result of an all-gather, the input of a reduce-scatter or an all-reduce. `sent` is what a device
sends of it in a ring of n: (n−1)/n for an all-gather, reduce-scatter or all-to-all, twice that for
an all-reduce, all of it for a permutation.

Between TPU slices, XLA delegates a collective to the host by a transfer: a `send`, which records
the kind of collective, and a recv-done that waits for the result.
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
_WORK = ("fusion", "while", "custom-call", "convolution", "dot")  # long enough to overlap with
_PIECES = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # mark a collective that a TPU splits

Groups = tuple[tuple[int, ...], ...]  # ids of devices that communicate


class Collective(NamedTuple):
    """A collective of the program."""

    kind: str
    axes: str  # of the mesh, joined by "+"; "other" if the groups match no axes
    groups: Groups
    times: int  # runs per step
    certain: bool  # False: `times` is too low, since a loop's trip count is unknown
    bytes: int  # per run
    sent: float  # per run
    overlapped: bool  # whether it runs beside other instructions


def collectives(
    program: Program, mesh: Mapping[str, int], slices: Sequence[int] = ()
) -> list[Collective]:
    """Return all collectives of a program, for a mesh of these axes and sizes.

    Args:
      slices: the slice of each device, in the mesh's order; empty: one slice.
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
            # a TPU splits one into pieces, each inside the fusion it overlaps with
            key = f"{channel[1]} {one.kind}" if channel and overlapped else instruction.name
            pieces.setdefault(key, one)
        found += pieces.values()
    return found


def totals(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Return sums by kind, the most sent first: count, bytes, sent, overlapped (bytes sent)."""
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
    """Yield (where, collective, overlapped, scattered) in a computation and all its fusions."""
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
    if scattered and kind == "all-reduce":  # a TPU fusion: each device keeps only its slice
        kind = "reduce-scatter"
    return _ring(kind, groups, axes, taken, False)


def _ring(kind: str, groups: Groups, axes, taken: int, overlapped: bool) -> Collective:
    n = len(groups[0])
    whole = taken * n if kind == "all-gather" else taken
    sent = whole * (n - 1) / n * (2 if kind == "all-reduce" else 1)
    return Collective(kind, _axes_of(groups, axes), groups, 1, True, whole, sent, overlapped)


def _across(slices: Sequence[int]) -> Groups:
    """Return groups of the devices at the same place of each slice."""
    members = [[i for i, s in enumerate(slices) if s == one] for one in sorted(set(slices))]
    return tuple(zip(*members, strict=True))


def _between_slices(where: Computation, send: Instruction, axes, groups: Groups) -> Collective:
    """Return a host's collective; it is overlapped if work precedes the wait for its result."""
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
    """Parse `replica_groups` in any of XLA's formats."""
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
    """Parse `mesh['data'=2,'fsdp'=4] {'fsdp'}`; part of an axis is `'fsdp':(before)size`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts: list[int] = []  # dimensions, partly used axes split
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
    """Parse device ids: `[4,2]T(1,0)` (all ids, reshaped and transposed) or a list."""
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
    """Return the mesh axes that the groups span, "none", or "other" if they match no axes."""
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
    """Return the mesh axes along which a permutation's senders and receivers differ."""
    shape = [size for _, size in axes]
    differ = set()
    for pair in pairs:
        sender, receiver = (np.unravel_index(device, shape) for device in pair)
        differ |= {i for i, (a, b) in enumerate(zip(sender, receiver, strict=True)) if a != b}
    return "+".join(axes[i][0] for i in sorted(differ)) or "none"
