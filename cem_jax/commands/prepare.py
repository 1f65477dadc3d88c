"""`cem prepare`: turn a corpus into a dataset directory, or check one."""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from cem_jax.commands.arguments import COUNT, add_inputs, local_path, number, text
from cem_jax.errors import UserError


def add(commands: Any) -> None:
    command = commands.add_parser(
        "prepare", help="turn text into a dataset of token shards, or check one"
    )
    add_inputs(command, required=False)
    command.add_argument(
        "--tokenizer", type=local_path, metavar="FILE", help="a SentencePiece .model"
    )
    command.add_argument(
        "--output",
        type=local_path,
        metavar="DIR",
        help="the dataset, which appears once complete; rerun the command to continue an "
        "interrupted one; one that another command made is refused",
    )
    command.add_argument(
        "--separator",
        choices=("bos", "eos", "both"),
        default="bos",
        help="token between documents (default: %(default)s)",
    )
    command.add_argument(
        "--source-field",
        type=text,
        metavar="NAME",
        help="field whose values name sources, such as meta.redpajama_set_name: each becomes a "
        "stream of its own, which data.mixture can weight and which is evaluated separately",
    )
    command.add_argument(
        "--validation-fraction",
        type=number(float, low=0, below=1),
        default=0.01,
        metavar="F",
        help="share of the documents, chosen by hash, that goes to the validation split "
        "(default: %(default)s)",
    )
    command.add_argument(
        "--workers",
        type=COUNT,
        default=usable_cpus(),
        metavar="N",
        help="processes; the result is the same for every number (default: %(default)s)",
    )
    command.add_argument(
        "--skip-bad-files",
        action="store_true",
        help="report bad files, keep what comes before the fault, and continue",
    )
    command.add_argument(
        "--check", type=local_path, metavar="DIR", help="check an existing dataset"
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prepare or check a dataset, print its splits and return their counts.

    Raises UserError for conflicting flags, and what `prepare` or `check_dataset` raises.
    """
    _require_flags(args)
    from cem_jax.data.corpus.prepare import prepare, totals
    from cem_jax.data.corpus.workspace import was_made
    from cem_jax.data.dataset.checks import check_dataset

    out = sys.stderr if args.json else sys.stdout
    if args.check is not None:
        result = totals(check_dataset(args.check)) | {"output": args.check}
        print(f"{args.check}: every checksum, id and count agrees", file=out)
        print_splits(result, out)
        return result
    again = was_made(args.output)
    result = prepare(
        args.input,
        args.tokenizer,
        args.output,
        column=args.text_column,
        source_field=args.source_field,
        separator=args.separator,
        workers=args.workers,
        skip_bad_files=args.skip_bad_files,
        validation_fraction=args.validation_fraction,
    )
    if again:
        print(
            f"finished: {args.output} has {result['tokens']:,} tokens of {result['documents']:,} "
            f"documents; `cem prepare --check {args.output}` verifies it",
            file=out,
        )
    else:
        print_splits(result, out)
    return result


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs this process may use by affinity and its control groups' quotas.

    `root` holds proc and sys. A group's quota also bounds the groups below it.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    groups = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return cpus
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = groups / "cpu" if controllers else groups
        group = top / path.strip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(top):
                quota = _quota(place, is_v1=bool(controllers))
                cpus = cpus if quota >= cpus else max(1, math.ceil(quota))
    return cpus


def _quota(group: Path, *, is_v1: bool) -> float:
    """Return a control group's limit in CPUs; infinity if it has none."""
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
    try:
        quota, period = " ".join((group / file).read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf


def _require_flags(args: argparse.Namespace) -> None:
    needed = {"--input": args.input, "--tokenizer": args.tokenizer, "--output": args.output}
    given = [flag for flag, value in needed.items() if value is not None]
    missing = [flag for flag in needed if flag not in given]
    if args.check is not None and given:
        raise UserError(f"--check cannot be combined with {', '.join(given)}")
    if args.check is None and missing:
        raise UserError(f"prepare needs {', '.join(missing)} (or --check DIR)")


def print_splits(result: dict[str, Any], out: TextIO) -> None:
    """Print documents, tokens and bytes of each split and source."""
    from cem_jax.text import aligned

    rows = [("split", "documents", "tokens", "bytes", "bytes/token")]
    for split, totals in result["splits"].items():
        parts = totals["sources"].items()
        named = [] if list(totals["sources"]) == ["all"] else parts
        for name, s in [(split, totals), *((f"  {source}", counts) for source, counts in named)]:
            counts = (f"{s[key]:,}" for key in ("documents", "tokens", "bytes"))
            rows.append((name, *counts, f"{s['bytes'] / s['tokens']:.2f}"))
    print(aligned(rows, "<>>>>"), file=out)
