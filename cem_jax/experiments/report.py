"""`cem report`: figures from the runs that are there, as pictures, tables and one page.

Reads a sweep's directory, or one of rows that `cem sweep --results` kept. Writes a PNG and CSV of
each figure, and index.html, which holds them all.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from cem_jax.data.remote import is_url
from cem_jax.errors import UserError
from cem_jax.experiments.differences import differences
from cem_jax.experiments.energies import draw_energies, eigenvalue_table, energy_lines
from cem_jax.experiments.figures import draw, draw_all_over_flops
from cem_jax.experiments.grid import BASE, Sweep, read_sweep
from cem_jax.experiments.page import Page, shown
from cem_jax.experiments.results import COLUMNS, Point, best_rates, points_of
from cem_jax.experiments.rows import read_rows, write_csv
from cem_jax.train.places import place

PAPER = BASE.parent / "paper"


def run(args: Namespace) -> dict[str, Any]:
    """{runs: the lines of all tables, best_rates, differences, missing, files}.

    Missing runs are no error. Raises UserError for a directory without rows and without energies,
    and for a figure's file with a mistake in it.
    """
    workdir = place(args.workdir)
    if is_url(workdir) and not args.output:
        raise UserError(f"--output: needed, a local directory, since --workdir {workdir} is a URL")
    if not workdir.is_dir():
        raise UserError(f"--workdir {workdir}: no such directory; `cem sweep` makes one")
    rows, energies = read_rows(workdir), energy_lines(workdir)
    if not rows and not energies:
        raise UserError(f"--workdir {workdir}: no finished run in it, and no energies to draw")
    report = _Report(workdir, Path(args.output) if args.output else Path(workdir) / "report")
    report.datasets(rows.values())
    for sweep in _sweeps(args, {row["size"] for row in rows.values()}):
        report.figure(sweep, points_of(sweep, rows.values(), args.overrides))
    report.overview()
    for name, lines in energies.items():
        report.energies(name, lines)
    return report.finish(sys.stderr if args.json else sys.stdout)


def _sweeps(args: Namespace, sizes: set[str]) -> list[Sweep]:
    """Those of --config; otherwise all of configs/paper, in miniature if there are such rows."""
    if args.config:
        return [read_sweep(path, args.size) for path in args.config]
    files = [*sorted(PAPER.glob("fig*.py")), *sorted(PAPER.glob("ours_*.py"))]
    found = (["mini"] if "mini" in sizes else []) + (["paper"] if sizes - {"mini"} else [])
    wanted = [args.size] if args.size else found
    return [read_sweep(str(file), size) for size in wanted for file in files]


class _Report:
    """What is written, section by section."""

    def __init__(self, workdir: epath.Path, output: Path):
        self.output = output
        output.mkdir(parents=True, exist_ok=True)
        self.page = Page(f"Runs in {workdir.name or workdir}")
        self.points: list[Point] = []
        self.lines: list[dict[str, Any]] = []
        self.best: list[dict[str, Any]] = []
        self.differences: list[dict[str, Any]] = []
        self.missing: list[str] = []
        self.files: list[Path] = []

    def datasets(self, rows) -> None:
        names = sorted({row["dataset"] for row in rows})
        if len(names) > 1:
            self.page.paragraph(
                f"The runs are of {len(names)} datasets and not to be compared across them: "
                + ", ".join(names)
            )

    def figure(self, sweep: Sweep, points: Sequence[Point]) -> None:
        missing = [str(point) for point in points if not point.rows]
        self.missing += missing
        present = [point for point in points if point.rows]
        new = [p for p in present if p.arm.name != sweep.baseline]
        if not new:
            return
        self.points += present
        sizes = "-".join(dict.fromkeys(point.size for point in present))
        stem = f"{sweep.name}-{sizes}"
        picture = self._file(f"{stem}.png")
        draw(sweep, present, picture)
        table = [point.line() for point in present]
        self.lines += table
        self._csv(f"{stem}.csv", table)
        self.page.heading(f"{sweep.name}: {sweep.title}")
        self.page.picture(picture, sweep.title)
        self.page.table([{n: v for n, v in line.items() if n != "figure"} for line in table])
        found = differences(sweep, present)
        self.differences += found
        self.page.table(found)
        if sweep.plot == "learning_rate":
            best = best_rates(present)
            self.best += best
            self.page.table(best)
        if missing:
            self.page.paragraph(f"Not run yet: {len(missing)}")
            self.page.list(missing)

    def overview(self) -> None:
        """All arms of each size over FLOPs: more parameters are not the only cost."""
        own = [point for point in self.points if point.rate == 1]
        for size in dict.fromkeys(point.size for point in own):
            picture = self._file(f"flops-{size}.png")
            draw_all_over_flops(own, size, picture)
            self.page.heading(f"All arms at {size}, over training FLOPs and parameters")
            self.page.picture(picture, f"perplexity over FLOPs at {size}")

    def energies(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        picture = self._file(f"energies-{name}.png")
        draw_energies(name, lines, picture)
        self.page.heading(f"Energies of {name}")
        self.page.picture(picture, f"energies of {name}")
        self.page.table(eigenvalue_table(lines))

    def finish(self, out) -> dict[str, Any]:
        self.page.write(self._file("index.html"))
        print(*self._summary(), sep="\n", file=out)
        return {
            "runs": self.lines,
            "best_rates": self.best,
            "differences": self.differences,
            "missing": self.missing,
            "files": self.files,
        }

    def _summary(self) -> Iterator[str]:
        for line in self.lines:
            names = "  ".join(shown(line[n]) for n in ("figure", "size", "arm", "learning_rate"))
            spread = f"± {shown(line['perplexity_std'])}, seeds: {line['seeds']}"
            yield f"{names}  perplexity {shown(line['perplexity'])} {spread}"
        for pair in self.differences:
            spread = f"± {shown(pair['interval'])}, seeds: {pair['seeds']}: {pair['verdict']}"
            yield (
                f"{pair['figure']}  {pair['size']}  {pair['arm']} against {pair['against']}: "
                f"{pair['difference']:+.4f} nats {spread}"
            )
        for best in self.best:
            edge = ", an end of the range" if best["at_edge"] else ""
            yield (
                f"{best['figure']}  {best['size']}  {best['arm']}: best learning rate "
                f"{best['learning_rate']:.3g}{edge}, perplexity {best['perplexity']:.3f}"
            )
        yield f"{len(self.missing)} runs are missing; {self.output / 'index.html'}"

    def _csv(self, name: str, table: Sequence[Mapping[str, Any]]) -> None:
        write_csv(epath.Path(self._file(name)), COLUMNS, table)

    def _file(self, name: str) -> Path:
        self.files.append(self.output / name)
        return self.files[-1]
