"""The demo's own parts: the corpus, the compressors, the curve, the table."""

import gzip
import json
import lzma

from matplotlib.axes import Axes

from cem_jax.commands import demo
from cem_jax.runs.curve import draw_loss_curve


def test_the_corpus_is_split_by_path_and_leaves_tests_out(tmp_path):
    source = tmp_path / "lib"
    names = [f"pkg/module_{n}.py" for n in range(80)] + ["test/test_x.py", "pkg/tests/y.py"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"# {name}\n")
    (source / "empty.py").write_text("")
    (source / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    demo.copy_corpus(source, tmp_path / "one")
    demo.copy_corpus(source, tmp_path / "two")
    listing = [
        {p.relative_to(tmp_path / run).as_posix() for p in (tmp_path / run).rglob("*.txt")}
        for run in ("one", "two")
    ]
    assert listing[0] == listing[1] and len(listing[0]) == 80
    held_out = {name for name in listing[0] if name.startswith("validation/")}
    assert 1 <= len(held_out) <= 15  # 80 / 16 = 5 expected


def test_compressed_sizes_are_those_of_the_compressors():
    files = [b"energy " * 200, b"gradient " * 300]
    sizes = demo.compressed_sizes(files)
    assert sizes["gzip_each"] == sum(len(gzip.compress(f, 9, mtime=0)) for f in files)
    assert sizes["xz_whole"] == len(lzma.compress(b"".join(files), preset=9))


def test_the_curve_compares_like_with_like(tmp_path, monkeypatch):
    """Losses of a part of the held-out files and of all of them are not joined into one curve."""
    drawn = {}

    def plot(self, x, y, *style, label="", **more):
        drawn[label] = y
        return real(self, x, y, *style, label=label, **more)

    real = Axes.plot
    monkeypatch.setattr(Axes, "plot", plot)
    train = {"kind": "train", "loss": 5.0, "learning_rate": 0.1}
    for sizes, kept in (([50, 50, 90], [1.0, 2.0]), ([90, 90, 90], [1.0, 2.0, 3.0])):
        lines = []
        for step, size in enumerate(sizes, start=1):
            lines.append(train | {"step": step, "tokens": 100 * step})
            lines.append({"kind": "eval", "step": step, "loss": float(step), "tokens": size})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        draw_loss_curve(tmp_path, tmp_path / "loss.png")
        assert drawn[f"held out, the same {sizes[0]} tokens each time"] == kept


def test_the_summary_and_the_curve_come_from_the_metrics(tmp_path):
    lines = [
        {"kind": "train", "step": 10, "loss": 5.0, "tokens": 100, "learning_rate": 0.1},
        {"kind": "eval", "step": 10, "loss": 4.0, "tokens": 50, "bits_per_byte": None},
        {"kind": "train", "step": 20, "loss": 4.0, "tokens": 200, "learning_rate": 0.1}
        | {"tokens_per_second": 7.0},
        {"kind": "eval", "step": 20, "loss": 3.0, "tokens": 90, "bits_per_byte": 1.5}
        | {"perplexity": 20.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a.txt").write_text("x" * 1000)
    numbers = demo.summary(tmp_path, tmp_path / "held", parameters=3)
    assert (numbers["bits_per_byte"], numbers["tokens"], numbers["parameters"]) == (1.5, 200, 3)
    assert numbers["gzip_each"] < 8
    draw_loss_curve(tmp_path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
