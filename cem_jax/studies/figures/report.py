"""Reports: figures of the runs that exist, as pictures, tables and one page.

Reads a sweep's directory, or one of rows that `cem sweep --results` kept. Writes a PNG and CSV
per figure and index.html, which contains them all, and removes files that an earlier report wrote
there and this one did not.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from cem_jax.errors import UserError
from cem_jax.storage.paths import is_url, place, writing
from cem_jax.studies.figures import tables
from cem_jax.studies.figures.energies import draw_energies, eigenvalue_table, energy_lines
from cem_jax.studies.figures.grid import BASE, Sweep, read_sweep
from cem_jax.studies.figures.page import Page, require_own
from cem_jax.studies.figures.pictures import arms_at, draw, draw_overview
from cem_jax.studies.figures.results import points_of
from cem_jax.studies.figures.rows import read_rows, write_csv
from cem_jax.studies.figures.scaling import Scaling
from cem_jax.studies.figures.scaling_picture import draw_scaling
from cem_jax.studies.figures.sections import Section, summary
from cem_jax.studies.figures.unmatched import Unmatched, unmatched

PAPER = BASE.parent / "paper"
GROUPS = ("mini", "ladder", "paper")  # groups of sizes at which all figures can be run


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
      files: figure files; none: all of configs/paper, at the groups of sizes that have rows.
      size: model size; None: what `files` say, or the sizes that have rows.
      overrides: (dotted field, text) pairs that the sweep set for all runs.

    Returns:
      {runs: the lines of all tables, best_rates, differences, comparisons, powers, missing,
      unplaced, files}. Missing runs are no error.

    Raises:
      UserError: before anything is written, for a directory without rows and energies, or with
        rows that are in no figure; for a figure file with a mistake; and for an output that is
        not a directory or has a page that no report wrote.
    """
    folder = place(workdir)
    if is_url(folder) and not output:
        raise UserError(f"--output: needed, a local directory, since --workdir {folder} is a URL")
    if not folder.is_dir():
        raise UserError(f"--workdir {folder}: no such directory; `cem sweep` makes one")
    rows, energies = list(read_rows(folder).values()), energy_lines(folder)
    if not rows and not energies:
        raise UserError(f"--workdir {folder}: no finished run in it, and no energies to draw")
    sweeps = _sweeps(files, size, {row.size for row in rows}) if rows else []
    sections = [Section(sweep, points_of(sweep, rows, overrides)) for sweep in sweeps]
    placed = {row.run for section in sections for p in section.points for row in p.rows}
    others = [row for row in rows if row.run not in placed]
    strays = unmatched(sweeps, others, overrides) if others else []
    if not energies and not placed:
        raise UserError(
            f"--workdir {folder}: none of its runs matches a requested figure",
            *map(str, strays),
        )
    target = Path(output) if output else Path(folder) / "report"
    require_own(target)
    with writing(target):
        page = Page(target, f"Runs in {folder.name or folder}")
        _preface(page, strays, sorted({row.dataset for row in rows}))
        begun = [section for section in sections if section.begun]
        for section in begun:
            _figure(page, section)
        _overviews(page, begun)
        for name, lines in energies.items():
            _energies(page, name, lines)
        _not_begun(page, [section for section in sections if not section.begun])
        written = page.write()
    scalings = [section.scaling for section in begun if section.scaling]
    print(*summary(sections, strays), written[-1], sep="\n", file=out)
    return {
        "runs": [line for section in begun for line in section.lines],
        "best_rates": [best for section in begun for best in section.best],
        "differences": [pair for section in begun for pair in section.differences],
        "comparisons": [asdict(one) for found in scalings for one in found.comparisons],
        "powers": [asdict(power) for found in scalings for power in found.powers],
        "missing": [name for section in sections for name in section.missing],
        "unplaced": [group.json() for group in strays],
        "files": written,
    }


def _sweeps(chosen: Sequence[str], size: str | None, sizes: set[str]) -> list[Sweep]:
    """Return the `chosen` figures, or all of configs/paper at the groups that have rows."""
    if chosen:
        return [read_sweep(path, size) for path in chosen]
    files = [*sorted(PAPER.glob("fig*.py")), *sorted(PAPER.glob("ours_*.py"))]
    at = lambda name: [read_sweep(str(file), name) for file in files]
    if size:
        return at(size)
    groups = [at(group) for group in GROUPS]
    begun = [group for group in groups if any(sizes & {*sweep.arms} for sweep in group)]
    return [sweep for group in begun or groups[-1:] for sweep in group]


def _preface(page: Page, strays: Sequence[Unmatched], datasets: Sequence[str]) -> None:
    if len(datasets) > 1:
        page.paragraph(
            f"The runs are of {len(datasets)} datasets and not to be compared across them: "
            + ", ".join(datasets)
        )
    if strays:
        count = sum(len(group.runs) for group in strays)
        page.paragraph(f"Rows that match no requested figure: {count}")
        page.bullets(map(str, strays))


def _figure(page: Page, section: Section) -> None:
    write_csv(Path(page.file(f"{section.stem}.csv")), list(map(asdict, section.lines)))
    page.heading(section.title)
    if section.comparable:
        page.picture(f"{section.stem}.png", section.title, partial(draw, section))
    for note in section.notes:
        page.paragraph(note)
    page.table(tables.of_lines(section.lines))
    page.table(tables.of_differences(section.differences))
    page.table(tables.of_best_rates(section.best))
    if section.scaling:
        _scaling(page, section.stem, section.scaling)
    if section.missing:
        page.paragraph(f"Not run yet: {len(section.missing)}")
        page.bullets(section.missing)


def _scaling(page: Page, stem: str, found: Scaling) -> None:
    page.paragraph("Each arm at its best learning rate, against Llama's curve over its sizes")
    if found.laws:
        draw_file = partial(draw_scaling, found)
        page.picture(f"{stem}-scaling.png", "loss over training FLOPs, and multipliers", draw_file)
    for note in found.notes:
        page.paragraph(note)
    page.table(tables.of_comparisons(found.comparisons))
    page.table(tables.of_powers(found.powers))


def _overviews(page: Page, sections: Iterable[Section]) -> None:
    own = [p for section in sections for p in section.present if p.rate == 1]
    baselines = {section.sweep.baseline for section in sections}
    for size in dict.fromkeys(point.size for point in own):
        arms = arms_at(size, own)
        if len(arms) > 2:  # two arms would repeat a figure's own picture
            page.heading(f"All arms at {size}, over training FLOPs and parameters")
            page.picture(
                f"flops-{size}.png",
                f"perplexity over FLOPs at {size}",
                partial(draw_overview, arms, baselines),
            )


def _energies(page: Page, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    page.heading(f"Energies of {name}")
    draw_file = partial(draw_energies, name, lines)
    page.picture(f"energies-{name}.png", f"energies of {name}", draw_file)
    page.table(tables.of_anything(eigenvalue_table(lines)))


def _not_begun(page: Page, sections: Sequence[Section]) -> None:
    """List the figures of which at most the baseline ran."""
    if sections:
        count = sum(len(section.missing) for section in sections)
        page.heading("Figures not begun")
        page.collapsed(
            f"Figures: {len(sections)}; runs that are missing: {count}",
            {f"{section.name}: {section.sweep.title}": section.missing for section in sections},
        )
