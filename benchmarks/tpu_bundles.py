"""A TPU kernel's bytes between HBM and VMEM, and bundles, from the compiler's dump.

* bytes: those of the kernel's DMAs, each counted as often as its block changes.
* cycles: bundles, each loop and branch counted as often as it runs. They include the scheduler's
  latencies but not hardware stalls, so they compare programs but do not predict times.

Both are for one batch element.
"""

import itertools
import os
import re
from pathlib import Path

HANDFUL = 30  # bundles
GRANULES = {"TPU v4": 512}  # bytes: the unit of a DMA's size in the dump, if not 32
BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*((?:>\s*)*)\{(.*)")
DMA = re.compile(r"dma\.(?:hbm_to_vmem|vmem_to_hbm|general)\b[^;]*?/\*size_in_granules=\*/(\d+)")
BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
TARGET = re.compile(r"Start/End empty region (\d+)")


def dumped(kernel) -> list[str]:
    """Return the lines of a kernel's final bundles."""
    files = Path(os.environ["CEM_DUMP"]).glob(f"*{kernel.name}*-final_bundles.txt")
    found = [x for x in files if "schedule-analysis" not in x.name]
    return max(found, key=lambda x: x.stat().st_size).read_text(errors="ignore").splitlines()


def bytes_moved(text: list[str], kernel, sizes, kind: str) -> int:
    """Return the bytes; blocks no DMA has the size of are not in HBM: XLA keeps them on chip."""
    from cem_jax.kernels.tpu.layout import padded_bytes

    granule = GRANULES.get(kind, 32)
    found = {int(granules) * granule for line in text for granules in DMA.findall(line)}
    whole, on_diagonal = tiles(sizes)
    seen = whole + on_diagonal
    times = dict(queries=sizes.query_blocks, all=1, keys=seen * sizes.sweeps, hbm=whole + seen)
    times["sequence"] = times["queries"]
    operands = [kernel.operand(name, sizes) for names in kernel.arrays(sizes) for name in names]
    blocks = [(x.part, padded_bytes(x.block(sizes), x.dtype)) for x in operands]
    return sum(size * times[part] for part, size in blocks if size in found)


def tiles(sizes) -> tuple[int, int]:
    """Return the numbers of tiles: (whole, on the diagonal)."""
    rows = sizes.query_blocks
    return sizes.ratio * rows * (rows - 1) // 2, sizes.ratio * rows


def cycles_of(text: list[str], sizes, together: int) -> float:
    """Count cycles; `together` is the maximal number of heads per pass of the loop over heads."""
    together = max(n for n in range(1, together + 1) if sizes.heads % n == 0)
    count = _streamed_cycles if sizes.streamed else _resident_cycles
    return count(text, sizes, sizes.heads // together)


def _resident_cycles(text: list[str], sizes, steps: int) -> float:
    """Depth 1 is the grid. Each sweep over the keys is a loop of depth 2 over whole tiles, with a
    loop of depth 3 over heads, then for each tile on the diagonal one of depth 2 over heads. What
    is done once per batch element counts as if each block of queries did it.
    """
    programs, (whole, _) = sizes.query_blocks, tiles(sizes)
    total, on_diagonal = 0, 0
    for depth, loop in _loops(_depths(text)):
        if depth == 1:
            total += programs * len(loop)
        elif max(loop) >= 3:
            total += whole * sum(steps if d >= 3 else 1 for d in loop)
            on_diagonal = sizes.ratio
        elif on_diagonal:
            total += programs * steps * len(loop)
            on_diagonal -= 1
        else:
            total += programs * len(loop)
    return total


def _streamed_cycles(text: list[str], sizes, steps: int) -> float:
    """Depth 1 is the grid. A branch with a loop over heads, of depth 2, is a tile: in each sweep
    the whole one, then those on the diagonal. Other branches of more than a handful are taken once
    per block of queries, and the rest by every program, including those beyond the diagonal.
    """
    depths = _depths(text)
    bodies = [span for span in _branches(text) if span[1] - span[0] > HANDFUL]
    inside = lambda inner, outer: outer[0] <= inner[0] and inner[1] <= outer[1] and inner != outer
    innermost = [x for x in bodies if not any(inside(other, x) for other in bodies)]
    looping = [x for x in innermost if max(depths[slice(*x)]) > 1]
    assert len(looping) == sizes.sweeps * (1 + sizes.ratio), "the dump has other branches"
    total, left = 0, sum(d == 1 for d in depths)
    for start, end in innermost:
        once = sum(d == 1 for d in depths[start:end])
        left -= once
        times = sizes.query_blocks
        if (start, end) in looping:
            once += steps * (end - start - once)
            if looping.index((start, end)) % (1 + sizes.ratio) == 0:
                times = tiles(sizes)[0]
        total += times * once
    return total + left * sizes.query_blocks * sizes.sweeps * sizes.key_blocks


def _depths(text: list[str]) -> list[int]:
    """Return, for every bundle, the number of loops around it."""
    return [m.group(1).count(">") for m in map(BUNDLE.match, text) if m]


def _branches(text: list[str]) -> list[tuple[int, int]]:
    """Return the bundles that a forward branch may skip: from the branch to its target."""
    count, branches, targets = 0, [], {}
    for line in text:
        if BUNDLE.match(line):
            branches += [(count, region) for region in BRANCH.findall(line)]
            count += 1
        targets |= dict.fromkeys(TARGET.findall(line), count - 1)
    return [(n, targets[region]) for n, region in branches if n < targets.get(region, 0)]


def _loops(depths: list[int]) -> list:
    """Return runs of bundles (1 or 2, their depths): at depth 1, and deeper.

    A handful of either is a loop's back edge or a branch inside it, and joins its neighbour.
    """
    found: list = []
    for kind, run in itertools.groupby((d for d in depths if d), key=lambda d: min(d, 2)):
        run = list(run)
        if found and (len(run) < HANDFUL or found[-1][0] == kind):
            found[-1][1].extend(run)
        else:
            found.append((kind, run))
    return found
