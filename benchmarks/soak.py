"""A soak: a small model trained under random kills, and what must hold all the same.

    .venv/bin/python benchmarks/soak.py --minutes 30 [--seed 0] [--keep DIR]

Three seeds are trained undisturbed. Then the one with the middle final loss is trained repeatedly
for the given minutes: one or all processes get SIGKILL or SIGTERM at random moments, and the run
resumes with the same or another mesh and number of processes. These promises are checked:

windows   every step, each time it ran, consumed exactly the rows of an undisturbed run
stretch   from checkpoint to checkpoint on one mesh, parameters and optimizer state are bit for bit
          those of an undisturbed stretch, whatever was killed in between
metrics   each step is once in metrics.jsonl, and the last line is the final evaluation
loss      the final loss lies where a fourth seed's would with 99 % (Student): on another mesh sums
          round differently, and a difference of 1e-6 grows over the steps
ends      after SIGTERM all end with 143 within the grace period; nothing fails by itself

Prints a table; exit status 1 if a promise is broken.
"""

import argparse
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import scipy.stats

sys.path.insert(0, str(Path(__file__).parents[1]))

from soak_checks import consumed_as_undisturbed, metrics_are_whole, same_state
from soak_runs import (
    FIELDS,
    GRACE,
    MESHES,
    Attempt,
    Mesh,
    dataset,
    final_loss,
    saved_steps,
)

SEEDS = (0, 1, 2)
KILL, TERM = signal.SIGKILL, signal.SIGTERM
PATIENCE = 300  # seconds
STRETCHES_CHECKED = 4  # of each disturbed run: each is trained again


@dataclass
class Tally:
    """A count of what was done, and the broken promises."""

    runs: int = 0
    attempts: int = 0
    kills: int = 0
    terms: int = 0
    mesh_changes: int = 0
    process_changes: int = 0
    steps: int = 0
    stretches: int = 0
    term_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def soak(minutes: float, rng: random.Random, folder: Path) -> Tally:
    """Run the whole soak in `folder`."""
    tally = Tally()
    data = dataset(folder)
    undisturbed = {}
    for seed in SEEDS:
        workdir = folder / f"seed{seed}"
        attempt = Attempt(workdir, data, MESHES[0], seed=seed)
        status = attempt.wait(1800)
        if status != [0]:
            sys.exit(f"the undisturbed run of seed {seed} ended with {status}:\n{attempt.output()}")
        undisturbed[final_loss(workdir)] = seed, workdir
        say(f"seed {seed}: final loss {final_loss(workdir):.4f}")
    low, high = expected(list(undisturbed))
    seed, reference = undisturbed[statistics.median(undisturbed)]
    end = time.monotonic() + 60 * minutes
    while not tally.runs or time.monotonic() < end:
        tally.runs += 1
        workdir = folder / f"run{tally.runs}"
        stretches = disturbed(workdir, data, seed, rng, end, tally)
        tally.broken += consumed_as_undisturbed(workdir, reference)
        loss = final_loss(workdir) if stretches else None
        if loss is None:  # time ran out
            break
        tally.losses.append(loss)
        tally.broken += metrics_are_whole(workdir, FIELDS["train.steps"])
        if not low <= loss <= high:
            tally.broken.append(f"{workdir.name}: final loss {loss} is not in {low} … {high}")
        check_stretches(workdir, data, seed, rng.sample(stretches, len(stretches)), tally)
        say(f"run {tally.runs}: final loss {loss:.4f} in {low:.4f} … {high:.4f}")
    return tally


def expected(losses: list[float]) -> tuple[float, float]:
    """Return the 99 % interval for a further loss like these."""
    count = len(losses)
    factor = float(scipy.stats.t.ppf(0.995, count - 1)) * math.sqrt(1 + 1 / count)
    middle, reach = statistics.mean(losses), factor * statistics.stdev(losses)
    return middle - reach, middle + reach


def disturbed(workdir, data, seed, rng, end, tally) -> list[tuple[Mesh, int, int]]:
    """Train to the end through signals, and return the stretches trained on one mesh.

    Each is a mesh with its first and last checkpoint. [] if time ran out or training failed.
    """
    stretches: list[tuple[Mesh, int, int]] = []
    mesh, begun, failures = MESHES[0], 0, 0
    while time.monotonic() < end + 600 and failures < 3:
        chosen = rng.choice(MESHES) if rng.random() < 0.5 else mesh
        if chosen != mesh:
            at = max(saved_steps(workdir), default=0)
            stretches.append((mesh, begun, at))
            tally.mesh_changes += 1
            tally.process_changes += chosen.processes != mesh.processes
            mesh, begun = chosen, at
        attempt = Attempt(workdir, data, mesh, seed=seed)
        sent = disturb(attempt, rng)
        statuses = attempt.wait(PATIENCE)
        tally.attempts += 1
        tally.steps += attempt.steps()
        if set(statuses) == {0}:
            stretches.append((mesh, begun, FIELDS["train.steps"]))
            return [stretch for stretch in stretches if stretch[1] < stretch[2]]
        problem = judge(sent, statuses, attempt, tally)
        if problem:
            failures += 1
            tally.broken.append(f"{workdir.name}, {mesh}, {attempt.steps()} steps: {problem}")
    return []


def disturb(attempt: Attempt, rng: random.Random) -> int | None:
    """Send a random signal to one process or all at a random moment."""
    if rng.random() < 0.2:  # while it starts, restores or compiles
        waited = attempt.sleep(rng.uniform(0, 15))
    else:  # the second step begins when the first one, which compiles, has been dispatched
        waited = attempt.await_steps(2 + round(rng.expovariate(1 / 40)))
        waited = waited and attempt.sleep(rng.uniform(0, 0.5))
    number = rng.choice((KILL, TERM))
    count = len(attempt.processes)
    attempt.send(number, range(count) if rng.random() < 0.5 else [rng.randrange(count)])
    return number


def judge(sent: int | None, statuses: list[int | None], attempt, tally: Tally) -> str | None:
    """Return what is wrong with the end of an attempt that did not finish the run."""
    shown = f"ended with {statuses}\n{attempt.output()[-2000:]}"
    if sent is None:
        return f"without a signal it {shown}"
    if None in statuses:
        return f"{PATIENCE} s after signal {sent} it had not ended: {shown}"
    if sent == KILL:
        tally.kills += 1
        return None
    tally.terms += 1
    tally.term_seconds.append(attempt.seconds_to_end())
    # Before its handlers are set, a process just ends (-15), and the others fail to meet it (1).
    good = {128 + TERM, 0} if attempt.steps() else {128 + TERM, 0, -TERM, 1}
    if not set(statuses) <= good:
        return f"after SIGTERM it {shown}"
    if attempt.seconds_to_end() > GRACE + 15:
        return f"after SIGTERM it took {attempt.seconds_to_end():.0f} s: {shown}"
    return None


def check_stretches(workdir, data, seed, stretches, tally: Tally) -> None:
    """Train some of the stretches again, undisturbed, from their first checkpoint."""
    for mesh, first, last in stretches[:STRETCHES_CHECKED]:
        again = workdir.with_name(f"{workdir.name}-{first}-{last}")
        if first:
            start = Path("checkpoints") / str(first)
            shutil.copytree(workdir / start, again / start)
            for name in ("config.json", "tokenizer.model"):
                shutil.copy(workdir / name, again / name)
        attempt = Attempt(again, data, mesh, seed=seed, stop_at=last)
        attempt.await_checkpoint(last, PATIENCE)
        attempt.send(KILL, range(mesh.processes))
        attempt.wait(PATIENCE)
        tally.stretches += 1
        tally.broken += same_state(workdir, again, last, f"{mesh}, {first} to {last}")
        shutil.rmtree(again, ignore_errors=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(tally: Tally, minutes: float) -> str:
    slowest = max(tally.term_seconds, default=0.0)
    rows = [
        ("minutes", f"{minutes:.0f}"),
        ("disturbed runs begun", str(tally.runs)),
        ("attempts", str(tally.attempts)),
        ("SIGKILL", str(tally.kills)),
        ("SIGTERM", f"{tally.terms}, slowest end {slowest:.1f} s"),
        (
            "changes of the mesh",
            f"{tally.mesh_changes}, of them of processes {tally.process_changes}",
        ),
        ("steps made, repeated ones too", f"{tally.steps:,}"),
        ("stretches trained again", str(tally.stretches)),
        ("final losses", ", ".join(f"{loss:.4f}" for loss in tally.losses)),
        ("broken promises", str(len(tally.broken))),
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work here, and leave it")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="cem-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tally = soak(args.minutes, random.Random(args.seed), folder)
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(tally, args.minutes))
    for line in tally.broken:
        print(f"broken: {line}")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
