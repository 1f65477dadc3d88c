"""`cem report` on rows that match no requested figure, and over an earlier report."""

import pytest
from tiny_figure import keep, report, write_figure

from cem_jax.cli import main

NINE = [("train.steps", 9)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows").mkdir()
    return tmp_path


def files(folder):
    return {file.name: file.read_bytes() for file in (folder / "rows" / "report").iterdir()}


def test_overrides_of_the_sweep_are_to_be_given_again(folder, capsys):
    """Without them no row matches: the error names them, and the earlier report stays."""
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: 20.0, overrides=NINE)
    assert report(folder, capsys, "--config", path, "--config.train.steps=9")["missing"] == []
    before = files(folder)
    assert main(["report", "--workdir", str(folder / "rows"), "--config", path]) == 2
    told = capsys.readouterr().err.splitlines()
    assert "none of its runs matches a requested figure" in told[0]
    assert told[1] == (
        "cem: error: 2 rows with train.steps=9; give --config.train.steps=9 for them"
    )
    assert files(folder) == before


def test_rows_beside_the_figures_are_told(folder, capsys):
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: 20.0)
    keep(folder, path, lambda arm, run: 20.0, overrides=NINE)
    words = "2 rows with train.steps=9; give --config.train.steps=9 for them"
    assert main(["report", "--workdir", str(folder / "rows"), "--config", path]) == 0
    assert f"matches no requested figure: {words}" in capsys.readouterr().out.splitlines()
    assert f"<li>{words}</li>" in files(folder)["index.html"].decode()
    (group,) = report(folder, capsys, "--config", path)["unplaced"]
    assert (group["rows"], group["differences"]) == (2, {"train.steps": 9})
    assert group["overrides"] == ["--config.train.steps=9"]
    assert len(group["runs"]) == 2


def test_what_figures_compare_is_no_override(folder, capsys):
    """A figure whose arms differ in the diagonal cannot be given another by a flag."""
    more = (
        "other = cem.copy_and_resolve_references(); other.model.attention.diagonal = {!r}; "
        "arms.append(Arm('other', other))"
    )
    path = write_figure(folder, more=more.format("per_head"))
    keep(folder, path, lambda arm, run: 20.0)
    keep(
        folder,
        write_figure(folder, "another", more=more.format("none")),
        lambda arm, run: 20.0 if arm == "other" else None,
    )
    (group,) = report(folder, capsys, "--config", path)["unplaced"]
    assert group["differences"] == {"model.attention.diagonal": "none"}
    assert group["overrides"] == []
    assert group["nearest"] == "mine, small, CEM"


def test_rows_of_a_size_that_no_figure_has(folder, capsys):
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: 20.0)
    assert main(["report", "--workdir", str(folder / "rows")]) == 2
    assert "2 rows of size small, which no requested figure has" in capsys.readouterr().err


def test_files_of_an_earlier_report_are_removed_and_no_others(folder, capsys):
    paths = [write_figure(folder, name) for name in ("mine", "other")]
    keep(folder, paths[0], lambda arm, run: 20.0)
    report(folder, capsys, "--config", *paths)
    for name in ("notes.png", "other-small-mine.csv"):
        (folder / "rows" / "report" / name).write_text("the user's own")
    assert "other-small.png" in files(folder)
    report(folder, capsys, "--config", paths[0])
    assert set(files(folder)) == {
        "mine-small.png",
        "mine-small.csv",
        "index.html",
        "notes.png",
        "other-small-mine.csv",
    }


def test_a_page_that_names_other_files_removes_none(folder, capsys):
    """Only pictures and tables beside the page are removed, whatever it names."""
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: 20.0)
    report(folder, capsys, "--config", path)
    page = folder / "rows" / "report" / "index.html"
    (folder / "rows" / "outside.png").write_text("")
    (folder / "rows" / "report" / "thesis.tex").write_text("")
    for name in ("../outside.png", "thesis.tex"):
        text = page.read_text()
        page.write_text(text.replace('content="mine-small.png"', f'content="{name}"'))
        report(folder, capsys, "--config", path)
    assert (folder / "rows" / "outside.png").exists()
    assert (folder / "rows" / "report" / "thesis.tex").exists()
