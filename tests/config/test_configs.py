"""The shipped configurations: their sizes and durations; every field of each can be set."""

from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from cem_jax.cli import parse_arguments
from cem_jax.config import fields, load_config
from cem_jax.config.values import describe
from cem_jax.model import pure

FOLDER = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(
    str(path)
    for path in [*FOLDER.glob("*.py"), *FOLDER.glob("scale/*.py")]
    if "def get_config" in path.read_text()
)

# size: (D, L, K, M, the Llama's parameters, steps)
TABLE = {
    "86m": (672, 8, 8, 1792, 86_371_488, 6590),
    "108m": (672, 12, 12, 1792, 108_052_896, 8244),
    "134m": (768, 12, 12, 2048, 134_105_856, 10231),
    "162m": (864, 12, 12, 2304, 162_813_024, 12422),
}

# Fields whose legal values depend on others, or are texts of a certain form.
TEXTS = {
    "model.dim": ("1536", 1536),
    "model.vocab_size": ("5000", 5000),
    "model.attention.heads": ("2", 2),
    "model.attention.tau": ("2.5", "2.5"),
    "model.attention.rope_base": ("500", 500.0),
    "model.attention.block_sizes": ("64,128", (64, 128)),
    "model.mlp.dim": ("96", 96),
    "data.mixture": ("a=1,b=0.5", ("a=1", "b=0.5")),
    "train.global_batch": ("256", 256),
    "train.microbatch": ("4", 4),
    "train.tokens": ("2e9", 2_000_000_000),
    "mesh.data": ("4", 4),
    "mesh.fsdp": ("2", 2),
    "mesh.tensor": ("2", 2),
    "mesh.context": ("2", 2),
    "log.profile_steps": ("[3,5]", (3, 5)),
}


def legal_value(name, annotation, current):
    """Return (command-line text, its value) of a value other than the current one."""
    if name in TEXTS:
        return TEXTS[name]
    words = describe(annotation)
    if words == "true or false":
        return str(not current), not current
    choices = [c for c in words.removeprefix("one of ").split(", ") if c != current]
    if words.startswith("one of "):
        return choices[0], choices[0]
    kind = words.removesuffix(" or None")
    return {"an integer": ("7", 7), "a number": ("0.25", 0.25), "a string": ("word", "word")}[kind]


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def load_from_flags(path, *flags):
    args = parse_arguments(["inspect", "--config", path, *flags])
    return load_config(args.config, args.overrides)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: Path(path).stem)
def test_every_field_can_be_set(path):
    shipped = load_config(path)
    for name, annotation in fields().items():
        text, value = legal_value(name, annotation, value_of(shipped, name))
        changed = value_of(load_from_flags(path, f"--config.{name}={text}"), name)
        assert changed == value, name
        assert type(changed) is type(value), name
        if describe(annotation).endswith("or None"):
            assert value_of(load_from_flags(path, f"--config.{name}", "None"), name) is None


@pytest.mark.parametrize("size", TABLE)
def test_paper_sizes_and_steps(size):
    dim, layers, heads, hidden, parameters, steps = TABLE[size]
    for kind in ("llama", "cem"):
        c = load_config(str(FOLDER / f"{kind}_{size}.py"))
        m = c.model
        assert (m.dim, m.layers, m.attention.heads, m.mlp.dim) == (dim, layers, heads, hidden)
        assert c.train.tokens == 20 * parameters
        assert c.total_steps == steps
        assert (c.train.global_batch, c.data.context, c.train.accumulation) == (128, 2048, 4)
        assert m.attention.kind == kind


@pytest.mark.parametrize(
    ("size", "cem", "llama"),
    [("1b3", 882_313_600, 1_345_423_360), ("7b", 4_264_039_424, 6_738_415_616)],
)
def test_sizes_beyond_the_paper(size, cem, llama):
    for kind, count in (("cem", cem), ("llama", llama)):
        path = FOLDER / "scale" / f"{kind}_{size}.py"
        c = load_config(str(path))
        assert pure.count(c.model) == count
        assert f"{count:,} parameters" in path.read_text() or f"({count:,})" in path.read_text()
        assert c.train.tokens == 20 * llama
        assert f"{c.total_steps:,} steps of" in path.read_text()


def test_headers_give_the_command():
    for path in SHIPPED:
        name = Path(path).relative_to(FOLDER.parent)
        if name.stem != "base":
            header = Path(path).read_text().split('"""')[1]
            assert f"cem train --config {name}" in header


def test_every_choice_of_a_field_loads():
    base = str(FOLDER / "base.py")
    for name, annotation in fields().items():
        if get_origin(annotation) is Literal:
            for choice in get_args(annotation):
                assert value_of(load_config(base, {name: choice}), name) == choice
