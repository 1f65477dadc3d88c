"""Benchmarks of the data side, one table each: `benchmarks/data.py NAME…`; all take half an hour.

speed    `cem prepare` against sentencepiece alone, on the same documents and processor cores
kills    `cem prepare` with 1 and 2 workers, killed three times and resumed: the same bytes?
memory   peak memory of `cem prepare` on a document of 200 MB and on 2 GB of documents
loader   tokens per second into training batches, against a plain gather from the mapped file

CEM_TEST_DATA names a folder with slimpajama-mini/ and tokenizers/mistral-v1-32k.model.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import sentencepiece

from cem_jax.data.corpus.files import find_files
from cem_jax.data.corpus.prepare import prepare
from cem_jax.data.corpus.readers import Fields, read_document, read_records
from cem_jax.data.dataset.loader import TrainLoader
from cem_jax.data.dataset.store import TokenStream, open_dataset

DATA = Path(os.environ.get("CEM_TEST_DATA", ""))
CORPUS, MODEL = DATA / "slimpajama-mini", DATA / "tokenizers" / "mistral-v1-32k.model"
ROUNDS = 3
CONTEXT, BATCH = 2048, 128


def speed(folder: Path) -> None:
    """Compare speeds; neither reads more than needed: sentencepiece has its documents in memory."""
    documents = texts(CORPUS / "train")
    size = sum(len(text.encode()) for text in documents) / 1e6
    processor = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
    calls = {
        "sentencepiece, 2 threads": lambda i: processor.encode(documents, num_threads=2),
        "cem prepare, 2 workers": lambda i: quietly(
            prepare, [str(CORPUS / "train")], MODEL, folder / f"speed{i}", workers=2,
            validation_fraction=0.0,
        ),
    }  # fmt: skip
    spent = {name: [] for name in calls}
    for i in range(ROUNDS):
        for name in list(calls)[:: -1 if i % 2 else 1]:
            began, cpu = time.perf_counter(), processor_seconds()
            calls[name](i)
            spent[name].append((time.perf_counter() - began, processor_seconds() - cpu))
    rows = []
    for name, both in spent.items():
        wall, cpu = (median(values) for values in zip(*both, strict=True))
        rows.append((name, f"{size / wall:.2f}", f"{size / cpu:.2f}"))
    rows.append(("ratio", *(f"{float(b) / float(a):.2f}" for a, b in zip(*(r[1:] for r in rows)))))  # noqa: B905
    table(f"speed: {size:.1f} MB of text", ("", "MB/s", "MB per second of processor"), rows)


def kills(folder: Path) -> None:
    rows, corpus = [], folder / "corpus"
    for copy in ("one", "two"):  # an idle machine reads one before three kills
        shutil.copytree(CORPUS, corpus / copy)
    for workers in (1, 2):
        for times in (0, 3):
            out = folder / f"kills-{workers}-{times}"
            rng = random.Random(workers)
            kept = []
            for _ in range(times):
                job = command("--workers", str(workers), "--output", str(out), corpus=corpus)
                before = journal_documents(out)
                while journal_documents(out) == before and job.poll() is None:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0, 0.5))
                job.send_signal(signal.SIGKILL)
                assert job.wait() == -signal.SIGKILL, "it ended before it was killed"
                kept.append(journal_documents(out))
            last = command("--workers", str(workers), "--output", str(out), corpus=corpus)
            assert last.wait() == 0
            rows.append((str(workers), " ".join(f"{n:,}" for n in kept), checksum(out)[:16]))
    assert len({digest for *_, digest in rows}) == 1, rows
    head = ("workers", "documents kept at each kill", "sha256")
    table("kills: all files of the dataset", head, rows)


def memory(folder: Path) -> None:
    rng = random.Random(0)
    sentences = [line for text in texts(CORPUS / "validation") for line in text.split("\n") if line]
    cases = {
        "a line of 200 MB": (200, 1, False),
        "the same with escapes and emoji": (200, 1, True),
        "2 GB in documents of 20 KB": (2000, 100_000, False),
        "5 documents of 40 MB": (200, 5, False),
    }
    rows = []
    for number, (name, (megabytes, count, ascii_only)) in enumerate(cases.items()):
        path = folder / f"memory{number}" / "a.jsonl"
        path.parent.mkdir()
        write_documents(path, sentences, megabytes, count, ascii_only, rng)
        out = folder / f"memory{number}-out"
        began = time.perf_counter()
        job = command("--workers", "2", "--output", str(out), corpus=path)
        peak = peak_megabytes(job)
        assert job.returncode == 0
        seconds = time.perf_counter() - began
        done = json.loads((out / "dataset.json").read_text())["splits"]
        size = sum(split["bytes"] for split in done.values()) / 1e6
        rows.append((name, f"{size:,.0f}", f"{peak:,.0f}", f"{size / seconds:.2f}"))
        print(*rows[-1], sep=", ", file=sys.stderr)  # the next one takes long
        path.unlink()
    head = ("input", "MB of text", "peak MB, all processes", "MB/s")
    table("memory of cem prepare, 2 workers", head, rows)


def loader(folder: Path) -> None:
    out = folder / "loader"
    quietly(prepare, [str(CORPUS)], MODEL, out, workers=2)
    dataset = open_dataset(out)
    load = TrainLoader(dataset, context=CONTEXT, global_batch=BATCH, seed=0, prefetch=4)
    (shard,) = TokenStream(dataset, "train").files
    ids = np.asarray(np.load(shard, mmap_mode="r"))
    windows = (len(ids) - 1) // CONTEXT
    rng, batches, step = np.random.default_rng(0), load.iterate(0), iter(range(10**9))

    def gather():
        starts = rng.integers(0, windows, BATCH) * CONTEXT
        return np.stack([ids[i : i + CONTEXT + 1] for i in starts.tolist()]).astype(np.int32)

    calls = {
        "plain gather from the mapped file": gather,
        "batch(step): shuffled, checked": lambda: load.batch(next(step)),
        "the same through grain": lambda: next(batches),
    }
    rates = {name: [] for name in calls}
    for _ in range(25):
        for name, call in calls.items():
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(40):
                call()
            tokens = 40 * BATCH * (CONTEXT + 1) / 1e6
            spent = time.perf_counter() - began, time.process_time() - cpu
            rates[name].append(tuple(tokens / seconds for seconds in spent))
    rows = []
    for name, both in rates.items():
        wall, cpu = zip(*both, strict=True)
        rows.append((name, f"{median(wall):,.0f}", f"{max(wall):,.0f}", f"{median(cpu):,.0f}"))
    head = ("", "million tokens/s, median", "best", "a second of processor, median")
    table(f"loader: [{BATCH}, {CONTEXT + 1}] int32, one process", head, rows)
    batches.close()


def texts(folder: Path) -> list[str]:
    fields = Fields("text")
    found = []
    for file in find_files([str(folder)]).files:
        for record in read_records(file.path, fields):
            found.append("".join(piece.text for piece in read_document(record, fields)[1]))
    return found


def write_documents(path, sentences, megabytes, count, ascii_only, rng) -> None:
    each = megabytes * 1_000_000 // count
    with path.open("w") as file:
        for _ in range(count):
            file.write('{"text": "')
            size = 0
            while size < each:
                text = "".join(s + (" 🚀\n" if ascii_only else "\n") for s in rng.choices(
                    sentences, k=50))  # fmt: skip
                size += len(text.encode())
                file.write(json.dumps(text, ensure_ascii=ascii_only)[1:-1])
            file.write('"}\n')


def command(*flags: str, corpus: Path = CORPUS) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "cem_jax", "prepare", "--input", str(corpus),
         "--tokenizer", str(MODEL), "--validation-fraction", "0", *flags],
        cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def journal_documents(out: Path) -> int:
    journal = out.with_name(f"{out.name}.partial") / "journal.json"
    with contextlib.suppress(OSError):
        streams = json.loads(journal.read_text())["state"]["tally"]["streams"]
        return sum(counts["documents"] for *_, counts in streams)
    return 0


def peak_megabytes(job: subprocess.Popen) -> float:
    """Return the peak memory of a process and its children, shared pages counted once (Pss)."""
    peak = 0
    while job.poll() is None:
        peak = max(peak, sum(map(proportional_set, family(job.pid))))
        time.sleep(0.05)
    return peak / 1e3


def family(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(p for child in children for p in family(int(child)))]
    return []


def proportional_set(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def processor_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def quietly(call, *args, **options):
    with contextlib.redirect_stderr(io.StringIO()):
        return call(*args, **options)


def checksum(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n**{title}**\n")
    for row in (head, tuple("---" for _ in head), *rows):
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


BENCHMARKS = {f.__name__: f for f in (speed, kills, memory, loader)}

if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHMARKS:
        with tempfile.TemporaryDirectory() as scratch:
            BENCHMARKS[name](Path(scratch))
