"""`cem report`: averages, the best learning rate, pictures and one page, even with runs missing."""

import csv
import json
import math
import re
import statistics

import numpy as np
import pytest
from etils import epath
from tiny_figure import keep, report, row, write_figure

from cem_jax.cli import main
from cem_jax.studies.figures.energies import eigenvalue_table, energy_lines
from cem_jax.studies.figures.grid import read_sweep, runs_of
from cem_jax.studies.figures.results import curves, interpolate, points_of

RATES = (0.25, 0.5, 1, 2, 4)
PNG = b"\x89PNG"


def bowl(rate, best):
    """Return a perplexity that is lowest at `best`, symmetrical in the logarithm."""
    return 20 + np.log(rate / best) ** 2


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows").mkdir()
    return tmp_path


def test_seeds_are_averaged(folder, capsys):
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: {"Llama": 20, "CEM": 22}[arm] + run.seed, seeds=range(3))
    result = report(folder, capsys, "--config", path)
    llama, cem = result["runs"]
    assert (llama["arm"], llama["seeds"], cem["seeds"]) == ("Llama", 3, 3)
    assert (llama["perplexity"], cem["perplexity"]) == (21, 23)
    assert llama["perplexity_std"] == pytest.approx(statistics.stdev([20, 21, 22]))
    assert result["missing"] == []
    with open(folder / "rows" / "report" / "mine-small.csv") as file:
        lines = list(csv.DictReader(file))
    assert [(line["arm"], float(line["perplexity"])) for line in lines] == [
        ("Llama", 21),
        ("CEM", 23),
    ]


@pytest.mark.parametrize(
    ("plot", "more", "fields"),
    [
        ("parameters", "", ""),
        ("learning_rate", "", f"rates={RATES},"),
        ("arms", "", ""),
        (
            "steps",
            "arms[1] = Arm('T = 1', cem, 'CEM', 1); two = cem.copy_and_resolve_references(); "
            "two.model.attention.steps = 2; arms.append(Arm('T = 2', two, 'CEM', 2))",
            "",
        ),
        ("gain", "arms = [Arm('Llama', llama, 'reuse', 1), Arm('CEM', cem, 'CEM', 2)]", ""),
        ("test_steps", "", "evaluate_steps=(1, 2),"),
    ],
)
def test_every_kind_of_picture(plot, more, fields, folder, capsys):
    path = write_figure(folder, plot=plot, more=more, fields=fields)
    best = {"Llama": 0.008}
    rate = lambda run: run.config.optimizer.learning_rate
    keep(
        folder,
        path,
        lambda arm, run: bowl(rate(run), best.get(arm, 0.016)),
        loss_at_steps={"1": 3.0, "2": 2.9},
    )
    result = report(folder, capsys, "--config", path, "--output", str(folder / "out"))
    overview = {"flops-small.png"} if plot == "steps" else set()  # of more than two arms
    names = {"mine-small.png", "mine-small.csv", "index.html"} | overview
    assert {file.name for file in (folder / "out").iterdir()} == names
    assert len(result["files"]) == len(names)
    assert (folder / "out" / "mine-small.png").read_bytes().startswith(PNG)
    page = (folder / "out" / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == 1 + len(overview)
    assert not re.search(r'(src|href)="(?!data:)', page)  # needs no other file
    for arm in {line["arm"] for line in result["runs"]}:
        assert f"<td>{arm}</td>" in page


def test_missing_runs_are_listed(folder, capsys):
    path = write_figure(folder, plot="learning_rate", fields=f"rates={RATES},")
    keep(folder, path, lambda arm, run: 30.0 if arm == "CEM" and run.seed == 0 else None)
    result = report(folder, capsys, "--config", path)
    assert len(result["missing"]) == 5
    assert "mine, small: Llama, learning rate 0.0025" in result["missing"]
    assert "Not run yet: 5" in (folder / "rows" / "report" / "index.html").read_text()


def test_a_figure_with_nothing_but_its_baseline_is_listed_and_not_drawn(folder, capsys):
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: 30.0 if arm == "Llama" else None)
    result = report(folder, capsys, "--config", path)
    assert result["missing"] == ["mine, small: CEM"]
    assert [file.name for file in (folder / "rows" / "report").iterdir()] == ["index.html"]
    page = (folder / "rows" / "report" / "index.html").read_text()
    assert "<li>mine, small: CEM</li></ul></details>" in page


THIRD = (
    "third = cem.copy_and_resolve_references(); third.model.attention.diagonal = 'none'; "
    "arms += [Arm('third', third)]; "
    "fourth = third.copy_and_resolve_references(); fourth.model.attention.position = 'none'; "
    "arms += [Arm('fourth', fourth)]"
)


def test_a_figure_says_in_its_title_how_much_of_it_ran(folder, capsys):
    path = write_figure(folder, plot="arms", more=THIRD)
    keep(folder, path, lambda arm, run: None if arm == "fourth" else 20.0)
    report(folder, capsys, "--config", path)
    page = (folder / "rows" / "report" / "index.html").read_text()
    assert 'alt="mine: A figure of one&#x27;s own (3 of 4 arms)"' in page


def test_one_point_beside_the_baseline_is_a_table_and_no_picture(folder, capsys):
    path = write_figure(folder, plot="arms", more=THIRD)
    keep(folder, path, lambda arm, run: 20.0 if arm in ("Llama", "third") else None)
    report(folder, capsys, "--config", path)
    assert (folder / "rows" / "report" / "mine-small.csv").exists()
    assert not list((folder / "rows" / "report").glob("*.png"))


def test_steps_at_evaluation_are_not_drawn_before_they_were_evaluated(folder, capsys):
    path = write_figure(folder, plot="test_steps", fields="evaluate_steps=(1, 2),")
    keep(folder, path, lambda arm, run: 20.0)
    report(folder, capsys, "--config", path)
    assert not list((folder / "rows" / "report").glob("*.png"))
    page = (folder / "rows" / "report" / "index.html").read_text()
    assert "Not evaluated with other T than trained" in page


def test_the_terminal_has_counts_first_and_a_shared_baseline_once(folder, capsys):
    paths = [write_figure(folder, name, plot="arms", more=THIRD) for name in ("mine", "other")]
    keep(folder, paths[0], lambda arm, run: None if arm == "fourth" else 20.0)
    assert main(["report", "--workdir", str(folder / "rows"), "--config", *paths]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        "3 runs in 2 figures; missing: 2",
        "  mine, small: 1",
        "  other, small: 1",
    ]
    assert told.count("small, Llama: perplexity 20.0, seed 0") == 1
    assert sum(line.startswith("  CEM: perplexity 20.0, seed 0") for line in told) == 2
    assert not [line for line in told if line.startswith("  Llama")]


def test_interpolation_passes_through_the_points_and_finds_the_optimum():
    rates = np.array([0.0005, 0.001, 0.002, 0.004, 0.008])
    fine, curve = interpolate(rates, bowl(rates, 0.002))
    for rate in rates:
        nearest = np.argmin(abs(np.log(fine / rate)))
        assert fine[nearest] == pytest.approx(rate, rel=1e-9)  # 400 intervals: every point is met
        assert curve[nearest] == pytest.approx(bowl(rate, 0.002), rel=1e-9)
    assert fine[curve.argmin()] == pytest.approx(0.002)


@pytest.mark.parametrize(("best", "edge"), [(0.013, False), (0.001, True), (1.0, True)])
def test_the_best_learning_rate(best, edge, folder):
    path = write_figure(folder, plot="learning_rate", fields=f"rates={RATES},")
    sweep = read_sweep(path)
    rows = [row(r, bowl(r.config.optimizer.learning_rate, best)) for r in runs_of([sweep])]
    for found in (curve.best for curve in curves(points_of(sweep, rows))):
        assert found.at_edge == edge
        ends = min(max(best, 0.0025), 0.04)
        # Akima's slopes are local: between points a factor 2 apart it is off by a few per cent
        assert found.learning_rate == pytest.approx(ends, rel=0.1)


def test_a_curve_has_only_the_seeds_of_all_its_rates(folder, capsys):
    """Two more seeds at one rate, far worse, do not bend the curve."""
    path = write_figure(folder, plot="learning_rate", fields=f"rates={RATES},")
    rate = lambda run: run.config.optimizer.learning_rate
    own = lambda arm, run: 90 if run.seed else bowl(rate(run), 0.01)
    keep(folder, path, own)
    expected = report(folder, capsys, "--config", path)["best_rates"]
    keep(folder, path, lambda a, run: own(a, run) if rate(run) == 0.01 else None, seeds=(1, 2))
    result = report(folder, capsys, "--config", path)
    assert result["best_rates"] == expected
    assert [best["seed_numbers"] for best in expected] == ["0", "0"]
    assert {(line["seeds"], line["seed_numbers"]) for line in result["runs"]} == {(1, "0")}


def test_rates_without_a_seed_in_common_have_no_curve(folder, capsys):
    path = write_figure(folder, plot="learning_rate", fields=f"rates={RATES},")
    first = lambda run: run.config.optimizer.learning_rate == 0.0025
    keep(folder, path, lambda arm, run: 20.0 if first(run) != (run.seed == 1) else None, (0, 1))
    assert report(folder, capsys, "--config", path)["best_rates"] == []
    assert "no seed ran at all" in (folder / "rows" / "report" / "index.html").read_text()


def test_an_empty_or_broken_directory(folder, capsys):
    assert main(["report", "--workdir", str(folder / "none")]) == 2
    assert main(["report", "--workdir", str(folder / "rows")]) == 2
    (folder / "rows" / "broken.json").write_text("{")
    assert main(["report", "--workdir", str(folder / "rows")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.startswith("cem: error: ") for line in told] == [True] * 3
    assert "no such directory" in told[0]
    assert "no finished run in it" in told[1]
    assert "broken.json: cannot be read as JSON" in told[2]


def energies(step, *, layers=2, steps=2, mlp=True):
    table = lambda columns: [[0.1 * i + t for t in range(columns)] for i in range(layers)]
    fields = ("energy_change", "rise_fraction", "descent_ratio", "force_norm")
    sublayer = {"energy": table(steps + 1), "cosine": table(steps - 1)}
    sublayer |= {name: table(steps) for name in fields}
    ends = {"smallest_eigenvalue": [1.2] * layers, "largest_eigenvalue": [1.5] * layers}
    attention = sublayer | {name: table(steps) for name in ("entropy", "self_mass")} | ends
    line = {"step": step, "kind": "energies", "sequences": 4, "attention": attention}
    return line | ({"mlp": sublayer} if mlp else {})


@pytest.mark.parametrize(("steps", "mlp"), [(1, False), (2, True)])
def test_energies_are_drawn(steps, mlp, folder, capsys):
    run = folder / "rows" / "a-run"
    run.mkdir()
    lines = [{"step": 5, "kind": "train"}, *(energies(n, steps=steps, mlp=mlp) for n in (5, 10))]
    lines[-1]["attention"]["energy"][0][0] = None  # was not finite
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = report(folder, capsys)
    assert (folder / "rows" / "report" / "energies-a-run.png").read_bytes().startswith(PNG)
    assert result["runs"] == []
    found = energy_lines(epath.Path(folder / "rows"))["a-run"]
    assert [line["step"] for line in found] == [5, 10]
    assert [(line["sublayer"], line["layer"]) for line in eigenvalue_table(found)] == [
        ("attention", 0),
        ("attention", 1),
    ]


@pytest.mark.parametrize("value", [None, math.nan])
@pytest.mark.parametrize("name", ["loss", "perplexity"])
def test_a_run_that_diverged_is_shown_and_compared_with_nothing(name, value, folder, capsys):
    path = write_figure(folder, plot="arms")
    keep(folder, path, lambda arm, run: 20.0, seeds=range(3))
    file = min((folder / "rows").glob("*seed1.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    result = report(folder, capsys, "--config", path)
    means = [line[name] for line in result["runs"]]
    assert means.count(None) == 1 and len(means) == 2  # not finite: null in JSON
    (pair,) = result["differences"]
    assert pair["seeds"] == (2 if name == "loss" else 3)


@pytest.mark.parametrize(
    "change", [{"run": None}, {"config": None}, {"seed": "0"}, {"loss": "low"}, {"tokens": None}]
)
def test_a_row_that_lacks_something_is_named(change, folder, capsys):
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: 20.0)
    file = min((folder / "rows").glob("*.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(["report", "--workdir", str(folder / "rows"), "--config", path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{file.name}: a row without, or of another kind: {next(iter(change))}")


def test_an_output_that_is_not_a_reports_is_left_alone(folder, capsys):
    path = write_figure(folder)
    keep(folder, path, lambda arm, run: 20.0)
    (folder / "file").write_text("mine")
    (folder / "page").mkdir()
    (folder / "page" / "index.html").write_text("mine")
    (folder / "link").mkdir()
    (folder / "link" / "index.html").symlink_to(folder / "file")
    for name in ("file", "page", "link"):
        flags = ["--config", path, "--output", str(folder / name)]
        assert main(["report", "--workdir", str(folder / "rows"), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("cem: error: ") and name in line
    assert (folder / "file").read_text() == (folder / "page" / "index.html").read_text() == "mine"
