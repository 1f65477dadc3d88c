"""`cem prepare` run again when its dataset is complete."""

import json

import pytest
from corpora import files_of, write_jsonl

from cem_jax import cli
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.checks import check_dataset
from cem_jax.data.dataset.store import description_bytes, open_dataset
from cem_jax.errors import UserError

FRACTION = 0.2


@pytest.fixture
def corpus(tmp_path, texts):
    write_jsonl(tmp_path / "corpus" / "a.jsonl", texts)
    return tmp_path / "corpus"


@pytest.fixture
def command(tmp_path, corpus, model_file):
    """Return the arguments of a command line."""
    return [
        "prepare", "--input", str(corpus), "--tokenizer", str(model_file),
        "--output", str(tmp_path / "out"), "--validation-fraction", str(FRACTION),
    ]  # fmt: skip


def test_the_same_command_is_finished(tmp_path, command, capsys):
    assert cli.main([*command, "--json"]) == 0
    first, before = json.loads(capsys.readouterr().out), files_of(tmp_path / "out")
    assert cli.main([*command, "--workers", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == (
        f"finished: {tmp_path / 'out'} has {first['tokens']:,} tokens of {first['documents']:,} "
        f"documents; `cem prepare --check {tmp_path / 'out'}` verifies it\n"
    )
    assert shown.err == ""
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert files_of(tmp_path / "out") == before
    assert not (tmp_path / "out.partial").exists()


def test_the_output_may_be_inside_the_input(corpus, model_file):
    first = prepare([str(corpus)], model_file, corpus / "tokens")
    assert prepare([str(corpus)], model_file, corpus / "tokens") == first


def test_places_of_bad_records_are_not_stored(tmp_path, corpus, model_file):
    (corpus / "b.jsonl").write_text('{"text": "x"}\nbroken\n')
    (corpus / "c.jsonl").write_text('{"body": "x"}\n')
    how = dict(skip_bad_files=True)
    first = prepare([str(corpus)], model_file, tmp_path / "out", **how)
    again = prepare([str(corpus)], model_file, tmp_path / "out", **how)
    assert first["cases"] and first["bad_files"]
    assert again == first | {"cases": None, "bad_files": None}
    with pytest.raises(UserError, match="--skip-bad-files: 1 skipped there, not given now"):
        prepare([str(corpus)], model_file, tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--separator", "eos"], "--separator: 'bos' there, 'eos' now"),
        (["--validation-fraction", "0.1"], f"--validation-fraction: {FRACTION} there, 0.1 now"),
        (["--source-field", "set"], "--source-field: None there, 'set' now"),
    ],
)
def test_other_settings_are_refused(tmp_path, command, capsys, flags, difference):
    assert cli.main(command) == 0
    before = files_of(tmp_path / "out")
    capsys.readouterr()
    assert cli.main([*command, *flags]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert "is a complete dataset, and another command made it: name a new directory" in first
    assert rest == [f"cem: error: {difference}"]
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl"])
def test_changed_inputs_are_reported(tmp_path, corpus, command, capsys, name):
    assert cli.main(command) == 0
    write_jsonl(corpus / name, ["other"])
    assert cli.main(command) == 2
    shown = capsys.readouterr().err
    assert "the input files have changed since it was made from them" in shown
    assert "input files: '1 files of " in shown


def test_another_spelling_of_a_path_is_not_a_change(tmp_path, corpus, model_file, monkeypatch):
    prepare([str(corpus)], model_file, tmp_path / "out")
    monkeypatch.chdir(corpus.parent)
    assert prepare([corpus.name], model_file, tmp_path / "out")["tokens"] > 0


def test_a_dataset_without_a_recorded_command_is_like_any_directory(tmp_path, command, capsys):
    """An old version recorded none."""
    assert cli.main(command) == 0
    file = tmp_path / "out" / "dataset.json"
    description = json.loads(file.read_text())
    del description["command"]
    file.write_bytes(description_bytes(description))
    assert check_dataset(tmp_path / "out") and open_dataset(tmp_path / "out")
    assert cli.main(command) == 2
    assert "exists and is not empty: name a new directory" in capsys.readouterr().err


def test_a_damaged_dataset_is_not_finished(tmp_path, command, capsys):
    assert cli.main(command) == 0
    (tmp_path / "out" / "train" / "tokens-00000.npy").unlink()
    assert cli.main(command) == 2
    told = capsys.readouterr().err
    assert "tokens-00000.npy is missing" in told
    assert "is a damaged dataset: remove it, or name a new directory" in told
    (tmp_path / "out" / "dataset.json").write_text("[]")
    assert cli.main(command) == 2
    assert "exists and is not empty" in capsys.readouterr().err
