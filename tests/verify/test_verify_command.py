"""Rows, the table, and the command."""

import json

import numpy as np
import pytest
from verify_cases import BASE, CONFIGS, SMALL

from cem_jax import cli
from cem_jax.verify import report
from cem_jax.verify.rows import Reference, Row, compare, reference, relative_error


class TestRows:
    def test_relative_error(self):
        assert relative_error(np.array([1.0, 2.2]), np.array([1.0, 2.0])) == pytest.approx(0.1)
        assert relative_error(np.array([0.5]), np.array([0.0])) == 0.5
        assert relative_error(np.array([np.nan]), np.array([1.0])) == np.inf
        assert relative_error(np.zeros(2), np.zeros(3)) == np.inf

    def test_nan_never_passes(self):
        assert not Row("x", "", "float64", float("nan"), 1.0).passed
        assert not Row("x", "", "float64", float("inf"), 1.0).passed

    def test_the_tolerance_grows_with_the_condition(self):
        x = np.array([1.0 + 1e-3], np.float32)
        tolerances = []
        for function in (lambda x: x, lambda x: x - 1.0):
            wanted = reference(function, x, dtypes=("float32",))
            tolerances.append(compare("x", "", "float32", wanted.value, wanted).tolerance)
        assert tolerances[1] > 200 * tolerances[0]

    def test_rounding_beside_a_zero_gradient_passes_and_a_mistake_does_not(self):
        value = {"large": np.ones(2), "zero": np.zeros(2)}
        wanted = Reference(value, {"float64": {"large": 0.0, "zero": 0.0}})
        for offset, passed in ((1e-16, True), (1e-12, False)):
            found = {"large": np.ones(2), "zero": np.full(2, offset)}
            assert compare("x", "", "float64", found, wanted).passed is passed

    def test_the_worst_leaf_decides_and_is_named(self):
        value = {"a": np.ones(2), "b": np.ones(2)}
        wanted = Reference(value, {"float64": {"a": 0.0, "b": 0.0}})
        row = compare("x", "", "float64", {"a": np.ones(2), "b": np.full(2, 1.5)}, wanted)
        assert (row.error, row.detail, row.passed) == (0.5, "b", False)


class TestCommand:
    LLAMA = ("--config", str(CONFIGS / "llama_86m.py"))
    FLAGS = tuple(f"--config.{name}={value}" for name, value in SMALL.items())

    def test_json(self, capsys):
        assert cli.main(["verify", *self.LLAMA, *self.FLAGS, "--json"]) == 0
        out, err = capsys.readouterr()
        answer = json.loads(out)
        assert answer["passed"] is True
        assert answer["descent"] == []
        keys = {"check", "shape", "dtype", "error", "tolerance", "passed"}
        assert all(set(row) == keys for row in answer["rows"])
        assert {row["dtype"] for row in answer["rows"]} == {"float64", "float32", "bfloat16"}
        assert f"all {len(answer['rows'])} checks passed in" in err

    def test_a_failed_row_is_exit_1(self, capsys, monkeypatch):
        from cem_jax.model import GatedMLP

        branch = GatedMLP.branch
        monkeypatch.setattr(GatedMLP, "branch", lambda self, h: 0.9 * branch(self, h))
        assert cli.main(["verify", *self.LLAMA, *self.FLAGS]) == 1
        out, err = capsys.readouterr()
        assert "FAIL" in out
        assert "checks failed in" in out.splitlines()[-1]
        assert "[1/" in err

    def test_a_faulty_config_is_exit_2(self, capsys):
        assert cli.main(["verify", "--config", BASE, "--config.model.dim=7"]) == 2
        assert capsys.readouterr().err.startswith("cem: error: model.attention.heads")

    @pytest.mark.slow
    def test_a_whole_cem_config(self, capsys):
        config = str(CONFIGS / "quickstart.py")
        assert cli.main(["verify", "--config", config, *self.FLAGS, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [fact["sublayer"] for fact in answer["descent"]] == ["attention", "mlp"]

    def test_the_table_is_aligned(self):
        rows = [Row("short", "J1", "float64", 1e-9, 1e-8), Row("longer one", "J1", "float32", 1, 0)]
        header, _, title, *lines = report.table([("section", rows)])
        assert title == "section"
        assert [line[: header.index("shape")].strip() for line in lines] == ["short", "longer one"]
        assert [line.split()[-1] for line in lines] == ["ok", "FAIL"]
        assert len(list(report.summary(rows, 3.0))) == 2
