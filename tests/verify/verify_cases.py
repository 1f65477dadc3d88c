"""Tiny cases of `cem verify`, and the outcomes of their rows."""

from pathlib import Path

from cem_jax.config import load_config
from cem_jax.verify import descent, forces, special, whole
from cem_jax.verify.case import make_case

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BASE = str(CONFIGS / "base.py")
SMALL = {
    "model.dim": "8",
    "model.layers": "1",
    "model.attention.heads": "2",
    "model.attention.preconditioner_rank": "2",
    "model.mlp.dim": "6",
    "model.mlp.preconditioner_rank": "3",
}


def small_config(**overrides):
    return load_config(BASE, {**SMALL, **overrides})


def small(dtypes=("float64",), positions=9, **overrides):
    """Return a tiny case of the base configuration."""
    config = small_config(**overrides)
    return make_case(
        "case", config.model, positions, 0, dtypes, document_mask=config.data.document_mask
    )


def layer_rows(case):
    if case.model.attention.kind == "cem":
        yield from forces.attention_rows(case)
    if case.model.mlp.kind == "cem":
        yield from forces.mlp_rows(case)
    yield from special.llama_rows(case)
    yield from whole.whole_rows(case)
    yield from (row for _, row in descent.facts(case) if row is not None)


def outcomes(rows):
    """Return {check: whether all of its rows passed}."""
    found = {}
    for row in rows:
        found[row.check] = found.get(row.check, True) and row.passed
    return found


def failing(rows):
    return {check for check, passed in outcomes(rows).items() if not passed}
