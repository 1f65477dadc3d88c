"""An interrupted `cem prepare` continues to the same bytes as one that was not interrupted."""

import contextlib
import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpora import files_of, write_jsonl

from cem_jax.data.corpus import prepare as prepare_module
from cem_jax.data.corpus.encoding import Encoder
from cem_jax.data.corpus.limits import Limits
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.store import open_dataset
from cem_jax.errors import UserError

OPTIONS = {
    "shard_tokens": 700,
    "validation_fraction": 0.2,
    "skip_bad_files": True,
    # a journal entry after every batch, and batches of a few documents
    "limits": Limits(keep_seconds=0.0, batch=3000),
}


@pytest.fixture
def corpus(tmp_path, texts):
    """Write records to keep, drop and mend, an empty file, and a truncated one."""
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", texts[:30])
    (folder / "b.jsonl").write_text(
        '{"text": "x"}\nbroken\n{"text": "half \\ud83d"}\n{"text": ""}\n'
    )
    (folder / "c.jsonl").write_text("")
    records = "".join(json.dumps({"text": text}) + "\n" for text in texts[30:])
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(records.encode())[:-20])
    (folder / "e.txt").write_text(texts[0])
    return folder


@contextlib.contextmanager
def interrupted_after(monkeypatch, batches):
    """Interrupt `prepare` after this many batches, as Ctrl-C would."""
    encode_all = prepare_module.encode_all

    def some(*arguments):
        for number, encoded in enumerate(encode_all(*arguments)):
            if number == batches:
                raise KeyboardInterrupt
            yield encoded

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "encode_all", some)
        yield


def run(corpus, model_file, output, **options):
    return prepare([str(corpus)], model_file, output, **(OPTIONS | options))


@pytest.mark.parametrize("stops", [(1,), (4,), (9,), (2, 3, 3), (0, 5)])
def test_any_interruption_ends_in_the_same_bytes(tmp_path, corpus, model_file, monkeypatch, stops):
    whole = run(corpus, model_file, tmp_path / "whole")
    for batches in stops:
        with interrupted_after(monkeypatch, batches):
            run(corpus, model_file, tmp_path / "out")
        with pytest.raises(UserError, match="does not exist"):
            open_dataset(tmp_path / "out")
    resumed = run(corpus, model_file, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert {**resumed, "output": ""} == {**whole, "output": ""}
    assert not (tmp_path / "out.partial").exists()


def test_work_is_not_done_twice(tmp_path, corpus, model_file, monkeypatch):
    counted = []
    encode = Encoder.encode

    def counting(self, batch):
        counted.append(len(batch.records))
        return encode(self, batch)

    monkeypatch.setattr(Encoder, "encode", counting)
    run(corpus, model_file, tmp_path / "whole")
    whole = sum(counted)
    counted.clear()
    for batches in (3, 3):
        with interrupted_after(monkeypatch, batches):
            run(corpus, model_file, tmp_path / "out")
    run(corpus, model_file, tmp_path / "out")
    repeated = 2  # the batch in progress at each interruption
    assert sum(counted) <= whole + repeated * max(counted)


def test_data_beyond_the_journal_is_cut_off(tmp_path, corpus, model_file, monkeypatch):
    run(corpus, model_file, tmp_path / "whole")
    with interrupted_after(monkeypatch, 5):
        run(corpus, model_file, tmp_path / "out")
    train = tmp_path / "out.partial" / "train"
    with sorted(train.iterdir())[-1].open("ab") as shard:
        shard.write(b"half a batch")
    (train / "tokens-00077.npy").write_bytes(b"begun later")
    run(corpus, model_file, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_lost_shards_mean_starting_over(tmp_path, corpus, model_file, monkeypatch, capsys):
    run(corpus, model_file, tmp_path / "whole")
    with interrupted_after(monkeypatch, 5):
        run(corpus, model_file, tmp_path / "out")
    for shard in (tmp_path / "out.partial" / "train").iterdir():
        shard.write_bytes(shard.read_bytes()[:140])
    capsys.readouterr()
    run(corpus, model_file, tmp_path / "out")
    assert "starting over" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_journal_of_another_version_means_starting_over(
    tmp_path, corpus, model_file, monkeypatch, capsys
):
    run(corpus, model_file, tmp_path / "whole")
    with interrupted_after(monkeypatch, 5):
        run(corpus, model_file, tmp_path / "out")
    journal = tmp_path / "out.partial" / "journal.json"
    kept = json.loads(journal.read_text())
    del kept["state"]["tally"]
    journal.write_text(json.dumps(kept))
    run(corpus, model_file, tmp_path / "out")
    assert "starting over" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"separator": "eos"}, "--separator: 'bos' there, 'eos' now"),
        ({"column": "body"}, "--text-column"),
        ({"validation_fraction": 0.1}, "--validation-fraction: 0.2 there, 0.1 now"),
    ],
)
def test_another_command_does_not_continue(
    tmp_path, corpus, model_file, monkeypatch, change, words
):
    with interrupted_after(monkeypatch, 3):
        run(corpus, model_file, tmp_path / "out")
    before = files_of(tmp_path / "out.partial")
    with pytest.raises(UserError, match=words):
        run(corpus, model_file, tmp_path / "out", **change)
    assert files_of(tmp_path / "out.partial") == before


def test_changed_inputs_do_not_continue(tmp_path, corpus, model_file, monkeypatch):
    with interrupted_after(monkeypatch, 3):
        run(corpus, model_file, tmp_path / "out")
    write_jsonl(corpus / "a.jsonl", ["other"])
    with pytest.raises(UserError, match="input files: '5 files of"):
        run(corpus, model_file, tmp_path / "out")


def test_a_bad_file_late_in_a_corpus_does_not_cost_earlier_work(
    tmp_path, corpus, model_file, capsys
):
    with pytest.raises(UserError, match=r"d\.jsonl\.gz: is truncated"):
        run(corpus, model_file, tmp_path / "out", skip_bad_files=False)
    assert "keeps the work done so far; rerun the command to continue" in capsys.readouterr().err
    run(corpus, model_file, tmp_path / "out")
    run(corpus, model_file, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_three_times(tmp_path, texts, model_file, workers):
    corpus = tmp_path / "corpus"
    for name in "abc":
        write_jsonl(corpus / f"{name}.jsonl", [f"{name} {i} {t}" for i in range(60) for t in texts])
    code = (
        "from cem_jax.data.corpus.limits import Limits\n"
        "from cem_jax.data.corpus.prepare import prepare\n"
        "limits = Limits(keep_seconds=0.05, batch=50_000, small_corpus=0)\n"
        "if __name__ == '__main__':\n"
        f"    prepare([{str(corpus)!r}], {str(model_file)!r}, OUT, workers={workers},\n"
        "            shard_tokens=100_000, limits=limits)\n"
    )

    def start(name):
        script = tmp_path / f"{name}.py"
        script.write_text(code.replace("OUT", repr(str(tmp_path / name))))
        with (tmp_path / f"{name}.log").open("w") as log:
            return subprocess.Popen([sys.executable, script], stderr=log)

    log = tmp_path / "out.log"
    assert start("whole").wait(300) == 0
    journal = tmp_path / "out.partial" / "journal.json"
    for _ in range(3):
        job = start("out")
        reached, wanted = -1, journal_documents(journal) + 500
        deadline = time.monotonic() + 120
        while reached < wanted:
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
            reached = journal_documents(journal)
        job.send_signal(signal.SIGKILL)
        job.wait(60)
    assert start("out").wait(300) == 0
    assert "continuing after" in log.read_text()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def journal_documents(journal: Path) -> int:
    try:
        streams = json.loads(journal.read_text())["state"]["tally"]["streams"]
    except (OSError, ValueError):
        return 0
    return sum(counts["documents"] for *_, counts in streams)
