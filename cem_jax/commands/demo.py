"""`make demo`: the whole path from raw text to a trained model, on text that every machine has.

The corpus is the source code of Python's standard library. Each stage leaves its result in the
run's directory and is skipped if the result exists, so rerunning the demo resumes it.
"""

import argparse
import gzip
import hashlib
import lzma
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from cem_jax.commands.arguments import local_path
from cem_jax.commands.prepare import print_splits
from cem_jax.errors import UserError

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.py"
HELD_OUT = 16  # one file in this many is never trained on
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PROMPT = "def read_lines(path):\n"


def add(commands: Any) -> None:
    command = commands.add_parser(
        "demo", help="what `make demo` runs: from text to samples in minutes"
    )
    command.add_argument("--workdir", type=local_path, default="runs/demo", metavar="DIR")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict:
    """Run all stages, print the final table and return its numbers."""
    from cem_jax.config import load_config
    from cem_jax.model import pure
    from cem_jax.runs.curve import draw_loss_curve
    from cem_jax.runs.generation import generate_text
    from cem_jax.runs.run import Run
    from cem_jax.runs.training import train

    started = time.monotonic()
    workdir = Path(args.workdir)
    out = sys.stderr if args.json else sys.stdout
    if not CONFIG.exists():
        raise UserError(f"{CONFIG}: not found; run the demo from a checkout of the project")
    vocab_size = load_config(str(CONFIG)).model.vocab_size
    dataset = make_dataset(workdir, vocab_size, out)
    config = load_config(str(CONFIG), [("data.path", str(dataset))])
    result = train(config, workdir)
    draw_loss_curve(workdir, workdir / "loss.png")
    sample = generate_text(Run.open(str(workdir)), PROMPT, max_tokens=96, temperature=0.7, seed=1)
    (workdir / "sample.txt").write_text(PROMPT + sample)
    numbers = summary(workdir, workdir / "corpus" / "validation", pure.count(config.model))
    numbers |= {"step": result["step"], "seconds": time.monotonic() - started}
    _print_table(numbers, workdir, PROMPT + sample, out)
    return numbers


def make_dataset(workdir: Path, vocab_size: int, out: TextIO) -> Path:
    """Make corpus, tokenizer and dataset in `workdir`, unless they exist; return the dataset."""
    from cem_jax.data.corpus.prepare import prepare
    from cem_jax.data.corpus.tokenizer_training import train_tokenizer

    corpus, dataset = workdir / "corpus", workdir / "dataset"
    model = workdir / "demo-tokenizer.model"

    def learn() -> None:
        train_tokenizer([str(corpus)], model, vocab_size, out=out)

    def encode() -> None:
        print_splits(prepare([str(corpus)], model, dataset, workers=2), out)

    _stage(corpus, "corpus", lambda: copy_corpus(standard_library(), corpus), out)
    _stage(model, "tokenizer", learn, out)
    _stage(dataset, "dataset", encode, out)
    return dataset


def standard_library() -> Path:
    """Return the directory of this Python's own modules."""
    return Path(sysconfig.get_path("stdlib"))


def copy_corpus(source: Path, corpus: Path) -> None:
    """Copy the modules to `corpus`/train or `corpus`/validation, by a hash of their paths.

    Raises UserError when this Python is installed without its sources.
    """
    partial = corpus.with_name(corpus.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    found = 0
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source)
        if SKIPPED_FOLDERS & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few modules are in other encodings on purpose
        if not text:
            continue
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        split = "validation" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"
        target = (partial / split / name).with_suffix(".txt")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
        found += 1
    if not found:
        raise UserError(f"{source}: holds no Python sources; use a Python installed with them")
    partial.rename(corpus)


def compressed_sizes(files: list[bytes]) -> dict[str, int]:
    """Return the bytes that `gzip -9` and `xz -9` need, for each file alone and for all as one."""
    whole = b"".join(files)
    return {
        "gzip_each": sum(len(gzip.compress(data, 9, mtime=0)) for data in files),
        "gzip_whole": len(gzip.compress(whole, 9, mtime=0)),
        "xz_each": sum(len(lzma.compress(data, preset=9)) for data in files),
        "xz_whole": len(lzma.compress(whole, preset=9)),
    }


def summary(workdir: Path, held_out: Path, parameters: int) -> dict:
    """Return the numbers of the final table."""
    from cem_jax.runs.metrics import read_metrics

    lines = read_metrics(workdir)
    final = [line for line in lines if line["kind"] == "eval"][-1]
    trained = [line for line in lines if line["kind"] == "train"]
    files = [path.read_bytes() for path in sorted(held_out.rglob("*.txt"))]
    size = sum(map(len, files))
    return {
        "loss": final["loss"],
        "perplexity": final["perplexity"],
        "bits_per_byte": final["bits_per_byte"],
        **{name: 8 * count / size for name, count in compressed_sizes(files).items()},
        "held_out_files": len(files),
        "held_out_bytes": size,
        "parameters": parameters,
        "tokens": trained[-1]["tokens"],
        "tokens_per_second": trained[-1]["tokens_per_second"],
    }


def _stage(result: Path, name: str, make: Callable[[], object], out: TextIO) -> None:
    if result.exists():
        print(f"{name}: {result} exists", file=out)
        return
    result.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    make()
    print(f"{name}: {result} made in {time.monotonic() - began:.0f} s", file=out)


def _print_table(numbers: dict, workdir: Path, sample: str, out: TextIO) -> None:
    from cem_jax.text import aligned

    speed = numbers["tokens_per_second"]
    rows = [
        ("held-out loss", f"{numbers['loss']:.4f} nats per token"),
        ("perplexity", f"{numbers['perplexity']:.2f}"),
        ("bits per byte", f"{numbers['bits_per_byte']:.3f}"),
        ("  gzip -9", f"{numbers['gzip_each']:.3f} by file, {numbers['gzip_whole']:.3f} as one"),
        ("  xz -9", f"{numbers['xz_each']:.3f} by file, {numbers['xz_whole']:.3f} as one"),
        (
            "held out",
            f"{numbers['held_out_files']} files, {numbers['held_out_bytes'] / 1e6:.2f} MB",
        ),
        ("parameters", f"{numbers['parameters']:,}"),
        ("trained on", f"{numbers['tokens']:,} tokens in {numbers['step']:,} steps"),
        ("speed", "not measured" if speed is None else f"{speed:,.0f} tokens/s"),
        ("time", f"{numbers['seconds']:.0f} s, this run"),
        ("written", f"{workdir}/loss.png, {workdir}/sample.txt, {workdir}/metrics.jsonl"),
    ]
    print(file=out)
    print(aligned(rows, "<<"), file=out)
    print(f"\n--- a sample, prompted with {PROMPT!r} ---\n{sample}", file=out)
