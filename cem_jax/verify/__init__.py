"""Numerical verification that layer updates are gradients of energies and that shortcuts are exact.

Compares the config's own layer, its switches at a small random size, and random switches with
`plain`, an implementation straight from the equations, in float64, float32 and bfloat16.

    case     models with random values in every parameter
    plain    the oracle
    rows     errors, and the tolerances that rounding justifies
    forces   energies and forces at one state
    whole    the whole model: logits, parameter gradients, causality, decoding
    special  T=1 as Llama, rotary positions, activations, ALiBi slopes
    descent  where energies provably fall
    report   the printed table
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from cem_jax.config import Config
from cem_jax.sharding.mesh import require_devices
from cem_jax.verify import report
from cem_jax.verify.case import Case, config_case, random_case, small_case
from cem_jax.verify.descent import Fact, facts, theorem_rows
from cem_jax.verify.forces import attention_rows, mlp_rows
from cem_jax.verify.rows import Row
from cem_jax.verify.special import activation_rows, llama_rows, rotary_rows, slope_rows
from cem_jax.verify.whole import whole_rows

Stage = tuple[str, Callable[[], Iterable[Row]]]


def verify(config: Config) -> dict[str, Any]:
    """Print the table of checks and return `passed`, `rows` and `descent`.

    `descent` says what is provable about the descent of the config's own layers.
    """
    require_devices()
    known: list[Fact] = []
    sections = list(_sections(config, known))
    progress = report.Progress(sum(len(stages) for _, _, stages in sections))
    tables = []
    for title, words, stages in sections:
        rows: list[Row] = []
        for label, make_rows in stages:
            progress.stage(f"{title}: {label}")
            rows += make_rows()
        if rows:
            tables.append((f"{title}: {words}" if words else title, rows))
    progress.close()
    everything = [row for _, rows in tables for row in rows]
    passed = all(row.passed for row in everything)
    for line in report.table(tables):
        print(line)
    print()
    for fact in known:
        print(report.fact_line(fact))
    for line in report.summary(everything, progress.seconds):
        print(line)
    sys.stdout.flush()
    return dict(
        passed=passed,
        rows=[row.to_json() for row in everything],
        descent=[fact.to_json() for fact in known],
    )


def _sections(config: Config, known: list[Fact]) -> Iterable[tuple[str, str, list[Stage]]]:
    """Yield the table's sections: title, switches, stages that make rows; append facts to `known`.

    The facts are those about the descent of the config's own layers.
    """
    own, small = config_case(config), small_case(config)
    stages = [*_layer_stages(own), ("descent", lambda: _descent_rows(own, known))]
    yield own.title, own.switches, stages
    activations = [config.model.mlp.activation]
    functions: list[Stage] = [("ALiBi", lambda: slope_rows(own))]
    theorems: list[Stage] = [("descent", lambda: theorem_rows(small))] if own.has_energy else []
    yield small.title, small.switches, [*_layer_stages(small), *theorems]
    if own.has_energy:
        other = random_case(config)
        yield other.title, other.switches, _layer_stages(other)
        activations.append(other.model.mlp.activation)
        functions.append(("rotary", lambda: rotary_rows(own)))
    for name in dict.fromkeys(activations):
        functions.append((name, lambda name=name: activation_rows(name)))
    yield "functions", "", functions


def _layer_stages(case: Case) -> list[Stage]:
    stages: list[Stage] = []
    if case.model.attention.kind == "cem":
        stages.append(("attention", lambda: attention_rows(case)))
    if case.model.mlp.kind == "cem":
        stages.append(("MLP", lambda: mlp_rows(case)))
    if case.has_energy:
        stages.append(("T=1 as Llama", lambda: llama_rows(case)))
    return [*stages, ("whole model", lambda: whole_rows(case))]


def _descent_rows(case: Case, known: list[Fact]) -> Iterable[Row]:
    for fact, row in facts(case):
        known.append(fact)
        if row is not None:
            yield row
