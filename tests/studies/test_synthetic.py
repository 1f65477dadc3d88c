"""`cem synthetic`: its table, its files, and its behaviour when interrupted."""

import io
import json

import numpy as np
import pytest

from cem_jax import cli
from cem_jax.errors import UserError
from cem_jax.studies.synthetic import study
from cem_jax.studies.synthetic.models import MODELS, sizes
from cem_jax.studies.synthetic.training import Fit
from cem_jax.text import format_duration

SETTINGS = study.Settings(seeds=2, steps=4, points=20, test_points=10)


@pytest.fixture
def quick(monkeypatch):
    """Replace training by a stub that takes no time; return the kernels that were requested."""
    asked = []

    def fit(model, data, seeds, steps, report):
        asked.append(model.title)
        report(steps)
        return Fit(np.full(seeds, 0.1 / model.steps), np.arange(1.0, 1.0 + seeds))

    monkeypatch.setattr(study, "fit", fit)
    return asked


def test_dry_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["synthetic", "--dry-run", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert list(out) == ["models"] and list(out["models"]) == list(MODELS)
    assert out["models"]["cem_t8"] == {"parameters": 22_657, "flops": 37_196_800}
    assert cli.main(["synthetic", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "22,657" in shown and "FLOPs, forward, 100 points" in shown.splitlines()[0]
    assert not list(tmp_path.iterdir())


def test_small_run(capsys, tmp_path, quick):
    flags = ["--kernels", "rbf", "matern", "--seeds", "2", "--steps", "3", "--points", "20"]
    assert cli.main(["synthetic", *flags, "--workdir", str(tmp_path / "new" / "run")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + 2 * len(MODELS)
    assert shown[3].split()[:4] == ["RBF", "CEM-T1", "22,657", "6.73M"]
    assert "1.5000 ± 0.7071" in shown[3]
    table = json.loads((tmp_path / "new" / "run" / "table.json").read_text())
    assert set(table["kernels"]) == {"rbf", "matern"}
    assert table["kernels"]["rbf"]["models"]["plain"]["test"] == [1.0, 2.0]
    assert (tmp_path / "new" / "run" / "table.png").read_bytes().startswith(b"\x89PNG")


def test_finished_kernels_are_kept(tmp_path, quick, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    study.study(tmp_path, ["rbf"], SETTINGS, io.StringIO())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(study, "fit", interrupted)
        study.study(tmp_path, ["rbf", "matern"], SETTINGS, io.StringIO())
    assert [path.name for path in tmp_path.iterdir()] == ["rbf.json"]
    quick.clear()
    found = study.study(tmp_path, ["rbf", "matern"], SETTINGS, io.StringIO())
    assert list(found) == ["rbf", "matern"] and len(quick) == len(MODELS)


def test_another_studys_results_are_refused(tmp_path, quick):
    study.study(tmp_path, ["rbf"], SETTINGS, io.StringIO())
    with pytest.raises(UserError, match="steps 4 -> 5"):
        study.study(tmp_path, ["rbf"], SETTINGS._replace(steps=5), io.StringIO())


@pytest.mark.parametrize("content", ["", "[1, 2]", "{}", '{"settings": 3}'])
def test_damaged_results_are_named(tmp_path, quick, content):
    (tmp_path / "rbf.json").write_text(content)
    with pytest.raises(UserError, match=r"rbf\.json"):
        study.study(tmp_path, ["matern", "rbf"], SETTINGS, io.StringIO())
    assert not quick


@pytest.mark.parametrize(
    "flags", [["--kernels", "cubic"], ["--seeds", "0"], ["--steps", "-1"], ["--points", "x"]]
)
def test_faulty_flags(capsys, flags):
    assert cli.main(["synthetic", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"cem: error: argument {flags[0]}: ")


def test_a_work_directory_that_cannot_be(capsys, tmp_path, quick):
    (tmp_path / "file").write_text("")
    assert cli.main(["synthetic", "--workdir", str(tmp_path / "file")]) == 2
    assert "--workdir" in capsys.readouterr().err


def test_progress_says_how_long(monkeypatch):
    """16 s to compile and start, then 8 s per step of the plain model; the rest by FLOPs."""
    now = [0.0]
    monkeypatch.setattr(study.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    report = study._Progress(SETTINGS, 1, stream).of("rbf", "plain")
    now[0] = 16.0
    report(1)
    assert stream.getvalue() == "RBF  Plain  step 1/4  2 %\n"
    now[0] = 32.0
    report(3)
    flops = [sizes(model)["flops"] for model in MODELS.values()]
    left = (sum(flops) / flops[0] * 4 - 3) * 8 + 5 * 16
    assert stream.getvalue().splitlines()[1].endswith(f"ETA {format_duration(left)}")
