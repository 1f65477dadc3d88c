"""The command line: flags, exit codes, what goes to which stream. Commands are stand-ins here."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cem_jax import cli
from cem_jax.commands import COMMANDS, generate
from cem_jax.config import load_config
from cem_jax.errors import RunFailed, UserError

BASE = str(Path(__file__).resolve().parent.parent / "configs" / "base.py")
LIGHT = "import sys, cem_jax.cli; cem_jax.cli.parse_arguments(['verify', '--config', 'x']); "
HEAVY = "{'jax', 'flax', 'numpy', 'ml_collections', 'orbax', 'grain', 'optax', 'dataclasses'}"


@pytest.fixture
def command(monkeypatch):
    """Puts a function in the place of every command's `run`."""

    def install(run):
        for name in COMMANDS:
            monkeypatch.setattr(f"cem_jax.commands.{name}.run", run)

    return install


@pytest.fixture
def inspect(command):
    """`cem inspect` that loads the configuration and does no more."""

    def run(args):
        load_config(args.config, args.overrides)
        return {}

    command(run)
    return lambda *flags: cli.main(["inspect", *flags])


def errors(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(line.startswith("cem: error: ") for line in lines), err
    return [line.removeprefix("cem: error: ") for line in lines]


def test_help_is_light_and_quick():
    check = f"heavy = {HEAVY} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", LIGHT + check], check=True)
    seconds = []
    for _ in range(5):  # the best of several, since other work may share the machine
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "cem_jax", "--help"], check=True, capture_output=True, text=True
        )
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
    for name in COMMANDS:
        assert name.rstrip("_") in done.stdout


def test_version_and_help_exit_with_0(capsys):
    for flags, words in (
        (["--version"], "cem_jax "),
        (["train", "--help"], "--workdir"),
        (["demo", "--help"], "--workdir"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(flags)
        assert caught.value.code == 0
        assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: --config, --workdir"),
        (["train", "--config", BASE], "required: --workdir"),
        (["train", "--config", BASE, "--workdir", ""], "--workdir: is empty"),
        (["train", "--conf", BASE, "--workdir", "w"], "required: --config"),
        (["eval", "--workdir", "w", "x"], "unrecognized argument: x"),
        (["eval", "--workdir", "w", "--config.seed=1"], "unrecognized argument: --config.seed=1"),
        (
            ["eval", "--workdir", "w", "--batch", "0"],
            "--batch: 0 is out of range: must be at least",
        ),
        (["eval", "--workdir", "w", "--attention-steps", "0"], "--attention-steps: 0 is out"),
        (["eval", "--workdir", "w", "--mlp-steps", "two"], "expected an integer, got 'two'"),
        (["generate", "--workdir", "w", "--temperature", "-1"], "--temperature: -1.0 is out of"),
        (["generate", "--workdir", "w", "--temperature", "nan"], "expected a finite number"),
        (["generate", "--workdir", "w", "--top-p", "0"], "greater than 0 and at most 1"),
        (["generate", "--workdir", "w", "--top-p", "1.1"], "greater than 0 and at most 1"),
        (["generate", "--workdir", "w", "--top-k", "0"], "--top-k: 0 is out of range"),
        (["generate", "--workdir", "w", "--max-tokens", "-1"], "--max-tokens: -1 is out of range"),
        (["generate", "--workdir", "w", "--prompt", "\udcff"], "--prompt: is not valid UTF-8"),
        (["tokenizer", "--input", "a", "--output", "b", "--vocab-size", "1"], "1 is out of range"),
        (["prepare", "--check", "d", "--validation-fraction", "1"], "less than 1"),
        (["prepare", "--check", "d", "--separator", "pad"], "invalid choice: 'pad'"),
    ],
)
def test_bad_flags(flags, words, command, capsys):
    command(lambda args: pytest.fail("the command must not run"))
    assert cli.main(flags) == 2
    (line,) = errors(capsys)
    assert words in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "needs --input, --tokenizer, --output (or --check DIR)"),
        (["--check", "d", "--output", "o"], "--check cannot be combined with --output"),
    ],
)
def test_flags_of_prepare_that_do_not_go_together(flags, words, capsys):
    assert cli.main(["prepare", *flags]) == 2
    (line,) = errors(capsys)
    assert words in line


@pytest.mark.parametrize(
    "flags",
    [
        ["train", "--config", BASE, "--workdir"],
        ["train", "--config", BASE, "--workdir", "w", "--init-from"],
        ["eval", "--workdir"],
        ["generate", "--prompt", "a", "--workdir"],
        ["sweep", "--config", BASE, "--workdir"],
        ["sweep", "--config", BASE, "--workdir", "w", "--results"],
        ["report", "--workdir"],
    ],
)
def test_places_may_be_urls_with_two_slashes(flags, command, capsys):
    command(lambda args: {})
    for place in ("gs://bucket/x", "./s3:/x", "a:b", "a/s3:x", "C:x"):
        assert cli.main([*flags, place]) == 0
    for place in ("gs:/bucket/x", "s3:/x", "S3:/x", "gs:bucket/x", "memory:/x"):
        assert cli.main([*flags, place]) == 2
        (line,) = errors(capsys)
        assert f"{place}: a URL has two slashes after its colon" in line


@pytest.mark.parametrize(
    "flags",
    [
        ["export", "--workdir", "w", "--output"],
        ["import", "--input", "a", "--workdir"],
        ["import", "--workdir", "w", "--input"],
        ["tokenizer", "--input", "a", "--vocab-size", "300", "--output"],
        ["prepare", "--input", "a", "--tokenizer", "b", "--output"],
        ["prepare", "--input", "a", "--output", "b", "--tokenizer"],
        ["prepare", "--check"],
        ["report", "--workdir", "w", "--output"],
        ["synthetic", "--workdir"],
        ["demo", "--workdir"],
    ],
)
def test_what_must_be_local_is_no_url(flags, command, capsys):
    command(lambda args: pytest.fail("the command must not run"))
    assert cli.main([*flags, "gs://bucket/x"]) == 2
    assert "gs://bucket/x: must be a local path, not a URL" in errors(capsys)[0]
    assert cli.main([*flags, "gs:/bucket/x"]) == 2
    assert "a URL has two slashes" in errors(capsys)[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["config.train.steps=7"], "an override starts with two dashes: --config.train.steps=7"),
        (["-config.seed=7"], "an override starts with two dashes: --config.seed=7"),
        (["--config.model.scan_layers"], "needs a value: --config.model.scan_layers=VALUE"),
        (["--config.=3"], "--config.=3: names no field; expected --config.FIELD=VALUE"),
        (["--config.model.scan_layers", "--json"], "--config.model.scan_layers=VALUE"),
        (["--config.model.scan_layers=yes"], "model.scan_layers: expected true or false"),
        (["--config.optimizer.lr=1"], "optimizer.lr: no such field"),
        (["--config.model.attention.heads=7"], "heads: 7 does not divide model.dim 256"),
        (["--config.train.microbatch=100"], "microbatch: 100 does not divide train.global_batch"),
        (["--config.seed", "-1"], "seed: -1 is out of range"),
    ],
)
def test_bad_overrides(flags, words, inspect, capsys):
    assert inspect("--config", BASE, *flags) == 2
    (line,) = errors(capsys)
    assert words in line


def test_bad_config_files(inspect, tmp_path, capsys):
    assert inspect("--config", str(tmp_path / "none.py")) == 2
    assert "No such file" in errors(capsys)[0]
    broken = tmp_path / "broken.py"
    broken.write_text("x = (\n")
    assert inspect("--config", str(broken)) == 2
    assert "broken.py:1: SyntaxError" in errors(capsys)[0]


def test_all_problems_are_told(inspect, capsys):
    code = inspect("--config", BASE, "--config.seed=x", "--config.model.dim=0", "--config.a=1")
    assert code == 2
    assert len(errors(capsys)) == 3
    assert inspect("--config", BASE, "--config.a", "--jsn", "config.b=1") == 2
    assert len(errors(capsys)) == 3


def test_a_config_file_may_be_called_config(inspect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(Path(BASE).read_text())
    assert inspect("--config", "config.py", "--config.train.steps", "7") == 0


def test_arguments_reach_the_command(command, capsys):
    seen = []
    command(lambda args: seen.append(args) or {})
    assert cli.main(["train", "--config=c.py", "--workdir", "w", "--config.a.b=1"]) == 0
    assert cli.main(["generate", "--workdir", "w", "--prompt", "", "--step", "3"]) == 0
    assert cli.main(["demo"]) == 0
    train, generate, demo = seen
    assert (train.config, train.workdir, train.overrides) == ("c.py", "w", [("a.b", "1")])
    assert (generate.prompt, generate.step, generate.top_k, generate.seed) == ("", 3, None, 0)
    assert demo.workdir == "runs/demo"


@pytest.mark.parametrize(
    ("given", "prompt"),
    [(b"", ""), (b"one\n", "one"), (b"one\n\n", "one\n"), ("é ".encode(), "é ")],
)
def test_prompt_from_standard_input(given, prompt, monkeypatch, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(given)
    with file.open(encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert generate.standard_input() == prompt


def test_prompt_on_standard_input_must_be_utf8(monkeypatch, tmp_path, capsys):
    file = tmp_path / "prompt"
    file.write_bytes(b"\xff")
    with file.open(encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert cli.main(["generate", "--workdir", "w"]) == 2
    assert "not valid UTF-8" in errors(capsys)[0]


@pytest.mark.parametrize(
    ("raised", "code", "lines"),
    [
        (UserError("a", "b\nc"), 2, ["a", "b c"]),
        (RunFailed("the loss is not finite"), 1, ["the loss is not finite"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
)
def test_plain_exits(raised, code, lines, command, capsys):
    def run(args):
        raise raised

    command(run)
    assert cli.main(["demo", "--json"]) == code
    assert errors(capsys) == lines


def test_anything_else_shows_its_traceback(command, capsys):
    command(lambda args: {}["missing"])
    assert cli.main(["demo"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_failed_verification(command, capsys):
    command(lambda args: {"passed": False})
    assert cli.main(["verify", "--config", BASE, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"passed": False}


def test_json_alone_on_standard_output(command, capfd):
    def run(args):
        print("from Python")
        os.write(1, b"from below\n")
        return {
            "loss": float("nan"),
            "error": np.float32(np.inf),
            "shape": (np.int64(2), 3),
            "rows": [{"at": Path("w"), "ok": np.bool_(True), "curve": np.ones(2)}],
        }

    command(run)
    assert cli.main(["demo", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {
        "loss": None,
        "error": None,
        "shape": [2, 3],
        "rows": [{"at": "w", "ok": True, "curve": [1.0, 1.0]}],
    }
    assert "from Python" in err
    assert "from below" in err
    assert cli.main(["demo"]) == 0
    assert capfd.readouterr().out == "from Python\nfrom below\n"


def test_a_closed_pipe_is_no_traceback():
    script = (
        "import sys, cem_jax.cli as cli, cem_jax.commands.demo as demo\n"
        "def run(args):\n  for _ in range(100_000): print('a line of output')\n  return {}\n"
        "demo.run = run\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_output_to_a_full_disk_is_no_traceback(flags):
    script = (
        "import sys, cem_jax.cli as cli, cem_jax.commands.demo as demo\n"
        "def run(args):\n  print('a line of output')\n  return {}\n"
        "demo.run = run\n"
        f"sys.exit(cli.main(['demo', *{flags}]))\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE)
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("cem: error")]
    assert lines == ["cem: error: standard output cannot be written: No space left on device"]
    assert b"Traceback" not in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "--workdir=~/x"],
        ["export", "--workdir=r", "--output=~/x"],
        ["prepare", "--input=c", "--tokenizer=t", "--output=~/x"],
        ["tokenizer", "--input=c", "--vocab-size=300", "--output=~/x"],
    ],
)
def test_the_home_directory_is_expanded(argv, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert "/home/someone/x" in vars(cli.parse_arguments(argv)).values()


def test_the_home_directory_is_expanded_in_a_configuration(monkeypatch):
    from tiny import tiny_config

    from cem_jax.config.file import split_argument
    from cem_jax.runs.directory import with_absolute_paths

    monkeypatch.setenv("HOME", "/home/someone")
    data = with_absolute_paths(tiny_config(data__path="~/d")).data
    assert data.path == "/home/someone/d"
    mixed = tiny_config(data__path="", data__mixture=("~/a=1", "/b=2", "gs://b/~/c=3"))
    assert with_absolute_paths(mixed).data.mixture == ("/home/someone/a=1", "/b=2", "gs://b/~/c=3")
    assert str(split_argument("~/c.py:x")[0]) == "/home/someone/c.py"


@pytest.mark.parametrize(("hard", "code"), [(4000, 0), (128, 2)])
def test_the_limit_of_open_files_is_raised_or_named_in_one_line(hard, code):
    script = (
        "import sys, resource, cem_jax.cli as cli, cem_jax.commands.demo as demo\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (128, {hard}))\n"
        "def run(args):\n"
        "  held = [open(sys.executable) for _ in range(300)]; return {}\n"
        "demo.run = run\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("128 files are open" in done.stderr) == bool(code)
