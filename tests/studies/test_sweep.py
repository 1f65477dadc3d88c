"""`cem sweep`: trains, evaluates, skips finished runs, continues after failures."""

import dataclasses
import json
import math
from argparse import Namespace

import pytest
import tiny
from etils import epath
from tiny_figure import write_figure

from cem_jax.cli import main
from cem_jax.data.corpus import prepare
from cem_jax.studies.figures import sweep
from cem_jax.studies.figures.grid import read_sweep, runs_of
from cem_jax.studies.figures.rows import read_rows, training_seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def dataset(folder):
    """Prepare a dataset with splits train, validation and test."""
    tiny.tiny_dataset(folder / "first", documents=40)
    corpus = folder / "first" / "corpus"
    (corpus / "test").mkdir()
    for file in (corpus / "validation").glob("*.txt"):
        (corpus / "test" / file.name).write_text(file.read_text().upper() + "\n")
    prepare.prepare([str(corpus)], folder / "first" / "tokenizer.model", folder / "dataset")
    return folder / "dataset"


@pytest.fixture(scope="module")
def figure(folder):
    more = 'arms.append(Arm("broken", cem.copy_and_resolve_references()))\n'
    more += "    arms[-1].config.model.init_std = 1e30\n"
    more += "    arms[-1].config.train.max_bad_steps = 1"
    return write_figure(folder, more=more, fields="evaluate_steps=(2,),")


@pytest.fixture(scope="module")
def swept(folder, dataset, figure):
    """Run a sweep in which one arm fails."""
    workdir, results = folder / "work", folder / "results"
    flags = ["--workdir", str(workdir), "--results", str(results)]
    argv = ["sweep", "--config", figure, *flags, f"--config.data.path={dataset}", "--json"]
    return argv, main(argv), workdir, results


def test_a_failing_run_does_not_stop_the_others(swept, figure):
    _, code, workdir, results = swept
    assert code == 1
    runs = runs_of([read_sweep(figure)])
    table = json.loads((workdir / "table.json").read_text())["runs"]
    status = {line["figures"]: line["status"] for line in table}
    assert status["mine: Llama"] == status["mine: CEM"] == "finished"
    assert "non-finite steps in a row" in status["mine: broken"]
    assert (
        set(read_rows(epath.Path(workdir)))
        == set(read_rows(epath.Path(results)))
        == {run.name for run in runs[:2]}
    )
    header, *lines = (workdir / "table.csv").read_text().splitlines()
    assert header == ",".join(table[0])
    assert len(lines) == 3


def test_a_row_says_what_the_run_cost_and_reached(swept, figure, dataset, capsys):
    _, _, workdir, _ = swept
    run = runs_of([read_sweep(figure)])[1]
    row = read_rows(epath.Path(workdir))[run.name]
    flags = ["--workdir", str(workdir / run.name), "--split", "test", "--json"]
    for steps, expected in (([], row.loss), (["--attention-steps=2", "--mlp-steps=2"], None)):
        assert main(["eval", *flags, *steps]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["loss"] == pytest.approx(expected or row.loss_at_steps["2"], rel=1e-6)
    assert row.perplexity == pytest.approx(math.exp(row.loss))
    assert row.tokens == 3 * 4 * 16
    # 2·320·16 embeddings; 2·16² + β attention, diagonal 16; 3·16·24 MLP; 3 norms of 16; P
    a, p = 2 * 16 * 16 + 2 + 16, 2 * (16 + 2 * 16 * 4)
    assert row.parameters == 2 * 320 * 16 + a + p + 3 * 16 * 24 + 3 * 16
    assert str(dataset) not in json.dumps(dataclasses.asdict(row))


def test_finished_runs_are_skipped(swept, figure, monkeypatch, capsys):
    argv, _, workdir, _ = swept
    trained = []
    monkeypatch.setattr(sweep, "train", lambda config, folder: trained.append(folder.name))
    assert main(argv) == 1  # the broken one, which a stand-in has not trained, is tried again
    broken = runs_of([read_sweep(figure)])[2]
    assert trained == [broken.name]
    trained.clear()
    # the rows alone are enough
    argv = [str(workdir / "new") if word == str(workdir) else word for word in argv]
    assert main(argv) == 1
    assert trained == [broken.name]
    capsys.readouterr()
    assert main([*argv, "--print-commands"]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    assert broken.name in command


def test_a_row_that_lacks_an_evaluation_is_made_again(swept, folder, monkeypatch):
    argv, _, workdir, _ = swept
    (folder / "more").mkdir()
    path = write_figure(folder / "more", fields="evaluate_steps=(2, 3),")
    monkeypatch.setattr(sweep, "train", lambda config, folder: None)  # it is already trained
    argv = ["sweep", "--config", path, "--workdir", str(workdir), argv[-2]]
    assert main(argv) == 0
    rows = [row.loss_at_steps for row in read_rows(epath.Path(workdir)).values()]
    assert sorted(sorted(steps) for steps in rows) == [[], ["2", "3"]]  # Llama has no such steps


def test_another_dataset_is_refused(swept, tmp_path, capsys):
    argv, _, _, results = swept
    data = argv[-2]
    for name, row in read_rows(epath.Path(results)).items():
        dataclasses.replace(row, dataset="another").write(
            epath.Path(tmp_path) / "rows" / f"{name}.json"
        )
    argv = ["sweep", "--config", argv[2], "--workdir", str(tmp_path / "w"), data]
    assert main([*argv, "--results", str(tmp_path / "rows")]) == 2
    assert "2 finished runs were on another dataset" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("missing", ["path", "split"])
def test_unfit_data_is_told_before_anything_runs(missing, figure, tmp_path, capsys):
    path = tmp_path / "none" if missing == "path" else tiny.tiny_dataset(tmp_path, documents=8)
    argv = ["sweep", "--config", figure, "--workdir", str(tmp_path / "w")]
    assert main([*argv, f"--config.data.path={path}"]) == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_a_signal_stops_the_sweep_and_counts_as_no_failure(
    figure, dataset, tmp_path, monkeypatch, capsys
):
    def stopped(config, folder):
        raise SystemExit(143)  # as a run does after SIGTERM, once it is saved

    monkeypatch.setattr(sweep, "train", stopped)
    argv = ["sweep", "--config", figure, "--workdir", str(tmp_path)]
    with pytest.raises(SystemExit) as caught:
        main([*argv, f"--config.data.path={dataset}"])
    assert caught.value.code == 143
    table = json.loads((tmp_path / "table.json").read_text())["runs"]
    assert {line["status"] for line in table} == {"not finished"}


def test_training_seconds_of_a_run_that_was_resumed():
    line = lambda step, seconds: {"kind": "train", "step": step, "step_seconds": seconds}
    assert training_seconds([line(1, None)]) is None
    # steps 1 to 10 at 0.5 s, the last ten at 0.2 s; the first line after a resume has no time yet
    lines = [
        line(5, None),
        line(10, 0.5),
        {"kind": "eval", "step": 10},
        line(11, None),
        line(20, 0.2),
    ]
    assert training_seconds(lines) == pytest.approx(5 * 0.5 + 5 * 0.5 + 0.5 + 9 * 0.2)


def test_needs_a_sweep():
    with pytest.raises(SystemExit) as caught:
        main(["sweep", "--help"])
    assert caught.value.code == 0
    assert main(["sweep", "--workdir", "w"]) == 2


def test_arguments_reach_the_sweep(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr("cem_jax.commands.sweep.run", lambda args: seen.update(vars(args)) or {})
    argv = ["sweep", "--config", "a.py", "b.py:mini", "--workdir", "w", "--seeds", "3"]
    assert main([*argv, "--config.data.path=d"]) == 0
    args = Namespace(**seen)
    assert (args.config, args.seeds, args.size) == (["a.py", "b.py:mini"], 3, None)
    assert args.overrides == [("data.path", "d")]
