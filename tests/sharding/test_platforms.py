"""JAX_PLATFORMS that names a platform which this machine lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BASE = str(Path(__file__).parents[2] / "configs" / "base.py")


@pytest.mark.parametrize(
    ("platform", "command"),
    [
        ("nonsense", ["train", "--config", BASE, "--config.train.steps=2"]),
        ("cpu,nonsense", ["verify", "--config", BASE]),
        ("nonsense", ["synthetic", "--seeds", "1"]),
    ],
)
def test_an_absent_platform_is_one_line_and_exit_2(platform, command, tmp_path):
    if command[0] != "verify":
        command = [*command, "--workdir", str(tmp_path / "made")]
    done = subprocess.run(
        [sys.executable, "-m", "cem_jax", *command],
        env=os.environ | {"JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
    )
    told = [line for line in done.stderr.splitlines() if "error" in line or "Traceback" in line]
    assert done.returncode == 2, done.stderr
    assert len(told) == 1 and "Traceback" not in done.stderr
    assert told[0].startswith(f"cem: error: JAX_PLATFORMS={platform}: JAX finds no such device")
    assert "only " in told[0]
    assert not (tmp_path / "made").exists()
