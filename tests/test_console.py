"""Streams that are closed, full or unread, and Ctrl-C while modules are loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cem_jax import cli

SCRIPT = """
import sys, cem_jax.cli as cli, cem_jax.commands.demo as demo
def run(args):
    print("progress", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("done")
    return {"step": 3}
demo.run = run
sys.exit(cli.main(["demo", "--json"]))
"""


def in_shell(redirections, result):
    """(exit status, standard output) of a command that says something and works on."""
    line = f'"$0" -c "$1" "$2" {redirections}'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, SCRIPT, result], stdout=subprocess.PIPE, text=True
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "to",
    [
        "2>&-",
        pytest.param(
            "2>/dev/full",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here"),
        ),
        "<&- 2>&-",
    ],
)
def test_progress_that_nobody_reads_ends_nothing(to, tmp_path):
    status, out = in_shell(to, tmp_path / "result")
    assert (status, out) == (0, '{"step": 3}\n')
    assert (tmp_path / "result").read_text() == "done"


def test_progress_whose_reader_has_gone_ends_nothing(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", SCRIPT, tmp_path / "result"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, '{"step": 3}\n')
    assert (tmp_path / "result").read_text() == "done"


def test_a_closed_standard_output_takes_nothing_and_hurts_no_file(tmp_path):
    assert in_shell(">&-", tmp_path / "result") == (0, "")
    assert (tmp_path / "result").read_text() == "done"


def test_an_interrupted_import_is_an_interruption(monkeypatch, capsys):
    def run(args):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr("cem_jax.commands.demo.run", run)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "cem: error: interrupted\n"


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1"])
def test_characters_that_an_ascii_stream_lacks_are_replaced(encoding):
    script = (
        "import sys, cem_jax.cli as cli, cem_jax.commands.demo as demo\n"
        "def run(args):\n"
        "  print('√ ≤ 1'); print('√ 2', file=sys.stderr); return {}\n"
        "demo.run = run\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"? ? 1\n" and done.stderr.endswith(b" 2\n")
