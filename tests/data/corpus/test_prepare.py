import fcntl
import gzip
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from corpora import all_tokens, files_of, write_jsonl

from cem_jax.cli import main
from cem_jax.data.corpus.limits import Limits
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.dataset.store import open_dataset
from cem_jax.data.dataset.tokenizer import Tokenizer
from cem_jax.errors import UserError


def left_behind(folder):
    return [path.name for path in folder.iterdir() if "out" in path.name]


@pytest.mark.parametrize("separator", ["bos", "eos", "both"])
def test_streams_are_the_documents_between_separators(tmp_path, texts, tokenizer, model_file,
                                                      separator):  # fmt: skip
    write_jsonl(tmp_path / "c" / "train" / "a.jsonl", texts[:30])
    write_jsonl(tmp_path / "c" / "train" / "b.jsonl", texts[30:40])
    write_jsonl(tmp_path / "c" / "validation" / "a.jsonl", texts[40:])
    result = prepare([str(tmp_path / "c")], model_file, tmp_path / "out", separator=separator)
    dataset = open_dataset(tmp_path / "out")
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    for name, documents in (("train", texts[:40]), ("validation", texts[40:])):
        expected = []
        for text in documents:
            expected += [1] * (separator != "eos") + processor.encode(text)
            expected += [2] * (separator != "bos")
        stream = all_tokens(dataset, name)
        assert stream.dtype == np.uint16
        assert stream.tolist() == expected
        split = dataset.splits[name]
        assert split.documents == len(documents)
        assert split.bytes == sum(len(text.encode()) for text in documents)
        assert split.tokens == len(expected)
    assert result["documents"] == len(texts)
    assert result["tokens"] == sum(s["tokens"] for s in result["splits"].values())
    assert dataset.load_tokenizer().hash == tokenizer.hash == dataset.tokenizer_hash
    assert left_behind(tmp_path) == ["out"]


def test_result_does_not_depend_on_workers_or_shard_size(tmp_path, texts, model_file):
    write_jsonl(tmp_path / "c" / "a.jsonl", texts)
    limits = Limits(batch=3000, small_corpus=0)
    options = {"validation_fraction": 0.2, "limits": limits}
    for name, more in (("1", {}), ("2", {"workers": 2}), ("cut", {"shard_tokens": 1000})):
        prepare([str(tmp_path / "c")], model_file, tmp_path / name, **options, **more)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")
    whole, cut = open_dataset(tmp_path / "1"), open_dataset(tmp_path / "cut")
    assert len(cut.splits["train"].shards) > 5
    for split in ("train", "validation"):
        assert np.array_equal(all_tokens(whole, split), all_tokens(cut, split))


def test_the_hashed_split_is_stable_and_keeps_duplicates_together(tmp_path, model_file):
    texts = [f"document number {i}" for i in range(400)]

    def validation(order, name):
        write_jsonl(tmp_path / name / "a.jsonl", order)
        out = tmp_path / f"{name}.out"
        prepare([str(tmp_path / name)], model_file, out, validation_fraction=0.25)
        dataset = open_dataset(out)
        tokenizer = dataset.load_tokenizer()
        parts = {}
        for split in ("train", "validation"):
            pieces = np.split(all_tokens(dataset, split), np.flatnonzero(
                all_tokens(dataset, split) == 1))[1:]  # fmt: skip
            parts[split] = {tokenizer.decode(piece) for piece in pieces}
        assert not parts["train"] & parts["validation"]
        return parts["validation"]

    once = validation(texts, "a")
    assert 60 < len(once) < 140
    assert validation(texts[::-1] + texts, "b") == once


def test_folders_decide_the_split_instead_of_hashes(tmp_path, texts, model_file):
    for name in ("train", "valid", "test", "more"):
        write_jsonl(tmp_path / "c" / name / "a.jsonl", texts[:20])
    result = prepare([str(tmp_path / "c")], model_file, tmp_path / "out", validation_fraction=0.9)
    documents = {name: split["documents"] for name, split in result["splits"].items()}
    assert documents == {"train": 40, "validation": 20, "test": 20}


def test_text_files_are_one_document_each(tmp_path, texts, model_file):
    for i, text in enumerate(texts[:5]):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / f"{i}.txt").write_text(text)
    out = tmp_path / "out"
    prepare([str(tmp_path / "c")], model_file, out, validation_fraction=0.0)
    dataset = open_dataset(out)
    assert dataset.splits["train"].documents == 5
    decoded = dataset.load_tokenizer().decode(all_tokens(dataset, "train"))
    assert decoded == "".join(texts[:5])


def test_large_vocabularies_take_four_bytes(tmp_path, texts, model_file, monkeypatch):
    monkeypatch.setattr(Tokenizer, "__init__", widened(Tokenizer.__init__, 70_000))
    write_jsonl(tmp_path / "a.jsonl", texts[:5])
    prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out", validation_fraction=0)
    assert all_tokens(open_dataset(tmp_path / "out"), "train").dtype == np.uint32


def widened(init, size):
    def replaced(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.vocab_size = size

    return replaced


def test_dropped_and_mended_records_are_counted_and_located(tmp_path, model_file, capsys):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": ""}\nbroken\n{"text": "half \\ud83d"}\n{"other": 1}\n'
    )
    result = prepare([str(path)], model_file, tmp_path / "out")
    assert result["documents"] == 2
    assert result["dropped"] == {"empty_text": 1, "invalid_json": 1, "missing_column": 1}
    assert result["repaired"] == {"lone_surrogate": 1}
    assert result["cases"] == [
        f"{path}:2: empty_text",
        f"{path}:3: invalid_json",
        f"{path}:5: missing_column",
        f"{path}:4: lone_surrogate (mended)",
    ]
    assert f"{path}:3: invalid_json" in capsys.readouterr().err
    assert open_dataset(tmp_path / "out").dropped == result["dropped"]


def test_bad_files_stop_everything_or_are_skipped(tmp_path, texts, model_file):
    write_jsonl(tmp_path / "c" / "b.jsonl", texts[:10])
    cut = tmp_path / "c" / "a.jsonl.gz"
    records = b"".join(json.dumps({"text": f"{i} {t}"}).encode() + b"\n"
                       for i, t in enumerate(texts))  # fmt: skip
    cut.write_bytes(gzip.compress(records)[:-9])
    write_jsonl(tmp_path / "c" / "c.jsonl", [])
    (tmp_path / "c" / "wrong.jsonl").write_text('{"content": "a"}\n{"content": "b"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: is truncated.*--skip-bad-files"):
        prepare([str(tmp_path / "c")], model_file, tmp_path / "out")
    assert left_behind(tmp_path) == []
    result = prepare([str(tmp_path / "c")], model_file, tmp_path / "out", skip_bad_files=True)
    assert result["documents"] >= 10
    assert [bad.split(": ")[1] for bad in result["bad_files"]] == [
        "is truncated", "has no column 'text' in any record",
    ]  # fmt: skip
    assert result["dropped"] == {"empty_file": 1, "missing_column": 2}


def test_wrong_column_names_the_file_and_leaves_nothing(tmp_path, texts, model_file):
    write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(UserError, match=r"a\.jsonl: has no column 'content'"):
        prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out", column="content")
    assert left_behind(tmp_path) == []


def test_a_corpus_without_usable_documents_is_reported_with_reasons_and_places(
    tmp_path, model_file
):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with pytest.raises(UserError) as caught:
        prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out")
    assert "empty_text 1, null_text 1" in caught.value.messages[0]
    assert caught.value.messages[1].endswith("a.jsonl:1: empty_text")
    assert left_behind(tmp_path) == []


def test_all_faults_of_a_call_are_reported_at_once(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("kept")
    with pytest.raises(UserError) as caught:
        prepare(["nowhere"], tmp_path / "no.model", tmp_path / "full")
    assert len(caught.value.messages) == 3
    assert (tmp_path / "full" / "x").read_text() == "kept"


def test_leftovers_of_a_killed_run_are_cleared(tmp_path, texts, model_file):
    write_jsonl(tmp_path / "a.jsonl", texts)
    partial = tmp_path / "out.partial"
    (partial / "train").mkdir(parents=True)
    (partial / "train" / "tokens-00007.npy").write_bytes(b"half")
    (partial / "tokenizer.model").write_bytes(b"half")
    with pytest.raises(UserError, match="unfinished"):
        open_dataset(partial)
    (tmp_path / "out").mkdir()  # empty: allowed
    prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out")
    names = set(files_of(tmp_path / "out"))
    assert names <= {
        "dataset.json", "tokenizer.model", "train/tokens-00000.npy", "validation/tokens-00000.npy",
    }  # fmt: skip
    assert left_behind(tmp_path) == ["out"]


def test_two_processes_cannot_write_the_same_output(tmp_path, texts, model_file):
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is writing"):
            prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out")
    prepare([str(tmp_path / "a.jsonl")], model_file, tmp_path / "out")
    assert left_behind(tmp_path) == ["out"]


def worker_processes(parent):
    children = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True)
    return [int(pid) for pid in children.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_runs_leave_no_dataset_and_no_workers(tmp_path, texts, model_file, number):
    write_jsonl(tmp_path / "a.jsonl", texts * 300)
    code = (
        "from cem_jax.data.corpus.prepare import prepare\n"
        "if __name__ == '__main__':\n"
        f"    prepare([{str(tmp_path / 'a.jsonl')!r}], {str(model_file)!r},"
        f" {str(tmp_path / 'out')!r}, workers=2)\n"
    )
    (tmp_path / "job.py").write_text(code)
    job = subprocess.Popen([sys.executable, tmp_path / "job.py"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out.partial/train/*")):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    workers = worker_processes(job.pid)
    assert len(workers) >= 2
    job.send_signal(number)
    assert job.wait(60) != 0
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "out").exists()
    if number == signal.SIGINT:
        assert left_behind(tmp_path) == []


def test_command_and_check(tmp_path, texts, model_file, capfd):
    write_jsonl(tmp_path / "a.jsonl", texts)

    def run(*flags):
        assert main(["prepare", *map(str, flags), "--json"]) == 0
        printed = capfd.readouterr()
        assert "bytes/token" in printed.err
        return json.loads(printed.out)

    flags = ["--tokenizer", model_file, "--output", tmp_path / "out", "--separator", "both"]
    made = run("--input", tmp_path / "a.jsonl", *flags, "--workers", 2)
    checked = run("--check", tmp_path / "out")
    for key in ("documents", "tokens", "bytes", "dropped", "splits"):
        assert made[key] == checked[key]


def test_every_broken_file_of_the_shared_data(tmp_path, shared_data, model_file):
    folder = shared_data / "bad-inputs"
    expected = json.loads((folder / "EXPECT.json").read_text())
    bad_files = {"08_git_lfs_pointer.jsonl.zst", "13_truncated.jsonl.zst",
                 "13b_truncated.jsonl.gz", "29_wrong_column.parquet"}  # fmt: skip
    out = tmp_path / "out"
    for name, expectation in expected.items():
        if name in bad_files or expectation["good_docs"] == 0:
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                prepare([str(folder / name)], model_file, out)
        else:
            result = prepare([str(folder / name)], model_file, out, validation_fraction=0.0)
            assert result["documents"] == expectation["good_docs"], name
            dataset = open_dataset(out)
            stream = all_tokens(dataset, "train")
            assert np.count_nonzero(stream <= 2) == result["documents"]  # only the separators
            shutil.rmtree(out)
        assert left_behind(tmp_path) == []


def test_a_corpus_too_small_for_its_validation_fraction_is_reported(
    tmp_path, texts, model_file, capsys
):
    write_jsonl(tmp_path / "a.jsonl", texts[:3])
    source, how = [str(tmp_path / "a.jsonl")], dict(validation_fraction=1e-9)
    prepare(source, model_file, tmp_path / "one", **how)
    assert "--validation-fraction" in capsys.readouterr().err
    prepare(source, model_file, tmp_path / "two", validation_fraction=0.0)
    assert "--validation-fraction" not in capsys.readouterr().err
    with pytest.raises(UserError, match="--validation-fraction"):
        open_dataset(tmp_path / "one").split("validation")


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_the_share_of_unknown_pieces_is_counted_by_split_and_warned_of(
    tmp_path, texts, capsys, byte_fallback
):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=512,
        byte_fallback=byte_fallback,
        minloglevel=2,
    )
    (tmp_path / "t.model").write_bytes(model.getvalue())
    write_jsonl(tmp_path / "c" / "train" / "a.jsonl", ["a 汉 b 字"])
    write_jsonl(tmp_path / "c" / "validation" / "a.jsonl", ["plain"])
    prepare([str(tmp_path / "c")], tmp_path / "t.model", tmp_path / "d", validation_fraction=0)
    splits = open_dataset(tmp_path / "d").splits
    assert splits["train"].unknown == (0 if byte_fallback else 2)
    assert splits["validation"].unknown == 0
    share = f"{2 / splits['train'].tokens:.2%} of train, 0.00% of validation"
    assert (share in capsys.readouterr().err) is not byte_fallback
