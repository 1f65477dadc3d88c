"""Reports: figures from the runs that are there, as pictures, tables and one page.

Reads a sweep's directory, or one of rows that `cem sweep --results` kept. Writes a PNG and CSV of
each figure, and index.html, which holds them all; and removes those that an earlier report wrote in
the same place and this one has not.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from etils import epath

from cem_jax.errors import UserError
from cem_jax.storage.paths import place, writing
from cem_jax.storage.remote import is_url
from cem_jax.studies.figures import tables
from cem_jax.studies.figures.energies import draw_energies, eigenvalue_table, energy_lines
from cem_jax.studies.figures.grid import BASE, Sweep, read_sweep
from cem_jax.studies.figures.overview import arms_at, draw_overview
from cem_jax.studies.figures.page import Page, is_report, written_with
from cem_jax.studies.figures.pictures import draw
from cem_jax.studies.figures.results import COLUMNS, points_of
from cem_jax.studies.figures.rows import read_rows, write_csv
from cem_jax.studies.figures.sections import Section
from cem_jax.studies.figures.terminal import summary
from cem_jax.studies.figures.unmatched import Unplaced, unplaced

PAPER = BASE.parent / "paper"
_PAGE = "index.html"


def report(
    workdir: str,
    output: str | None = None,
    *,
    files: Sequence[str] = (),
    size: str | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    out: TextIO = sys.stdout,
) -> dict[str, Any]:
    """Write a report on a sweep's directory, and its summary to `out`.

    Args:
      workdir: the sweep's directory, or one of rows that `cem sweep --results` kept.
      output: a local directory; None: `workdir`/report.
      files: of the figures; none: all of configs/paper, in miniature if there are such rows.
      size: of the models; None: what `files` say, or what there are rows of.
      overrides: (dotted field, text) pairs that the sweep set for all runs.

    Returns:
      {runs: the lines of all tables, best_rates, differences, missing, unplaced, files}. Missing
      runs are no error.

    Raises:
      UserError: before anything is written, for a directory without rows and without energies, or
        with rows of which none is in a figure; for a figure's file with a mistake in it; and for an
        output that is no directory, or has a page of somebody else's.
    """
    folder = place(workdir)
    if is_url(folder) and not output:
        raise UserError(f"--output: needed, a local directory, since --workdir {folder} is a URL")
    if not folder.is_dir():
        raise UserError(f"--workdir {folder}: no such directory; `cem sweep` makes one")
    rows, energies = list(read_rows(folder).values()), energy_lines(folder)
    if not rows and not energies:
        raise UserError(f"--workdir {folder}: no finished run in it, and no energies to draw")
    sweeps = _sweeps(files, size, {row["size"] for row in rows}) if rows else []
    sections = [Section(sweep, points_of(sweep, rows, overrides)) for sweep in sweeps]
    placed = {row["run"] for section in sections for p in section.points for row in p.rows}
    others = [row for row in rows if row["run"] not in placed]
    strays = unplaced(sweeps, others, overrides) if others else []
    if not energies and not placed:
        raise UserError(
            f"--workdir {folder}: none of its runs stands in a figure as asked for",
            *map(str, strays),
        )
    target = Path(output) if output else Path(folder) / "report"
    _require_own(target / _PAGE)
    with writing(epath.Path(target)):
        written = _Written(target, f"Runs in {folder.name or folder}").all(
            sections, strays, energies, sorted({row["dataset"] for row in rows})
        )
    print(*summary(sections, strays), target / _PAGE, sep="\n", file=out)
    begun = [section for section in sections if section.begun]
    return {
        "runs": [line for section in begun for line in section.lines],
        "best_rates": [best for section in begun for best in section.best],
        "differences": [pair for section in begun for pair in section.differences],
        "missing": [name for section in sections for name in section.missing],
        "unplaced": [group.json() for group in strays],
        "files": written,
    }


def _require_own(page: Path) -> None:
    """Raises UserError for a page that is there and that no report wrote, or a link."""
    if page.is_symlink() or (page.is_file() and not is_report(page)):
        raise UserError(
            f"--output {page.parent}: {page.name} in it was not written by `cem report`; name "
            "another directory, or remove it"
        )


def _sweeps(chosen: Sequence[str], size: str | None, sizes: set[str]) -> list[Sweep]:
    """The `chosen` figures; otherwise all of configs/paper, in miniature if there are such rows."""
    if chosen:
        return [read_sweep(path, size) for path in chosen]
    files = [*sorted(PAPER.glob("fig*.py")), *sorted(PAPER.glob("ours_*.py"))]
    found = (["mini"] if "mini" in sizes else []) + (["paper"] if sizes - {"mini"} else [])
    wanted = [size] if size else found
    return [read_sweep(str(file), one) for one in wanted for file in files]


class _Written:
    """The files of a report in the folder `output`, which is made."""

    def __init__(self, output: Path, title: str):
        self.output = output
        self.page = Page(title)
        self.files: list[Path] = []

    def all(
        self,
        sections: Sequence[Section],
        strays: Sequence[Unplaced],
        energies: Mapping[str, Sequence[Mapping[str, Any]]],
        datasets: Sequence[str],
    ) -> list[Path]:
        """Write them all, the page last, and return them."""
        self.output.mkdir(parents=True, exist_ok=True)
        begun = [section for section in sections if section.begun]
        self._preface(strays, datasets)
        for section in begun:
            self._figure(section)
        self._overviews(begun)
        for name, lines in energies.items():
            self._energies(name, lines)
        self._nothing([section for section in sections if not section.begun])
        self._finish()
        return self.files

    def _preface(self, strays: Sequence[Unplaced], datasets: Sequence[str]) -> None:
        if len(datasets) > 1:
            self.page.paragraph(
                f"The runs are of {len(datasets)} datasets and not to be compared across them: "
                + ", ".join(datasets)
            )
        if strays:
            count = sum(len(group.runs) for group in strays)
            self.page.paragraph(f"Rows that stand in no figure as asked for: {count}")
            self.page.list(map(str, strays))

    def _figure(self, section: Section) -> None:
        write_csv(epath.Path(self._file(f"{section.stem}.csv")), COLUMNS, section.lines)
        self.page.heading(section.title)
        if section.comparable:
            picture = self._file(f"{section.stem}.png")
            draw(section, picture)
            self.page.picture(picture, section.title)
        for note in section.notes:
            self.page.paragraph(note)
        self.page.table(tables.of_points(section.lines))
        self.page.table(tables.of_differences(section.differences))
        self.page.table(tables.of_best_rates(section.best))
        if section.missing:
            self.page.paragraph(f"Not run yet: {len(section.missing)}")
            self.page.list(section.missing)

    def _overviews(self, sections: Iterable[Section]) -> None:
        own = [p for section in sections for p in section.present if p.rate == 1]
        baselines = {section.sweep.baseline for section in sections}
        for size in dict.fromkeys(point.size for point in own):
            arms = arms_at(size, own)
            if len(arms) > 2:  # two arms are a figure's own picture over again
                picture = self._file(f"flops-{size}.png")
                draw_overview(arms, baselines, picture)
                self.page.heading(f"All arms at {size}, over training FLOPs and parameters")
                self.page.picture(picture, f"perplexity over FLOPs at {size}")

    def _energies(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        picture = self._file(f"energies-{name}.png")
        draw_energies(name, lines, picture)
        self.page.heading(f"Energies of {name}")
        self.page.picture(picture, f"energies of {name}")
        self.page.table(tables.of_anything(eigenvalue_table(lines)))

    def _nothing(self, sections: Sequence[Section]) -> None:
        """The figures of which there is no more than the baseline."""
        if sections:
            count = sum(len(section.missing) for section in sections)
            self.page.heading("Figures not begun")
            self.page.collapsed(
                f"Figures: {len(sections)}; runs that are missing: {count}",
                {f"{section.name}: {section.sweep.title}": section.missing for section in sections},
            )

    def _finish(self) -> None:
        earlier = written_with(self.output / _PAGE)
        page = self._file(_PAGE)
        written = {file.name for file in self.files}
        self.page.write(page, sorted(written))
        for name in earlier - written:
            (self.output / name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        self.files.append(self.output / name)
        return self.files[-1]
