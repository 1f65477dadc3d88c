import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_attention.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_the_benchmark_runs_in_small_on_a_cpu():
    done = run("--tiny")
    assert done.returncode == 0, done.stderr
    for title in ("check: relative errors", "attention, bfloat16", "training step, bfloat16"):
        assert f"**{title}**" in done.stdout
    assert "cuDNN, no diagonal | refused: " in done.stdout
    rows = done.stdout.splitlines()
    assert sum(row.startswith(("| llama tiny", "| cem tiny")) for row in rows) == 3
    assert sum(row.endswith("True |") for row in rows) == 4


@pytest.mark.parametrize(
    ("arguments", "words"), [((), "needs a GPU"), (("--tiny", "speed"), "no such part: speed")]
)
def test_the_benchmark_says_what_it_lacks(arguments, words):
    done = run(*arguments)
    assert done.returncode == 1
    assert words in done.stderr
