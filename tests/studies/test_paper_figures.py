"""configs/paper: all runs are valid, have the right size, and differ as their figure says."""

from pathlib import Path

import pytest

from cem_jax.config import differences, leaves, load_config
from cem_jax.errors import UserError
from cem_jax.model import pure
from cem_jax.studies.figures.grid import read_sweep, runs_of

FOLDER = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted([*(FOLDER / "paper").glob("fig*.py"), *(FOLDER / "paper").glob("ours_*.py")])

CEM = "model.attention.position", "model.attention.self_bias"  # fields that come with CEM attention
ATTENTION = {"model.attention.kind", "model.attention.preconditioner", *CEM}
MLP = {"model.mlp.kind", "model.mlp.preconditioner"}
STEPS_A, STEPS_M = "model.attention.steps", "model.mlp.steps"
FULL = {"model.attention.kind", "model.mlp.kind", STEPS_A, STEPS_M, *CEM}
STEP_SIZES = {
    f"model.{sublayer}.{name}"
    for sublayer in ("attention", "mlp")
    for name in ("step_size", "learn_step_size")
}
EITHER = ATTENTION | MLP | {STEPS_A, STEPS_M} | STEP_SIZES  # one of the sublayers is CEM

# figure: fields that differ from Llama in some arm, and fields in which the CEM arms differ
SAYS = {
    "fig2a": (ATTENTION | {"model.attention.diagonal"}, {"model.attention.diagonal"}),
    "fig2b": (MLP | {"model.mlp.dim"}, {"model.mlp.dim"}),
    "fig2c": (ATTENTION | {STEPS_A}, {STEPS_A, "model.attention.preconditioner"}),
    "fig2d": (MLP | {STEPS_M}, {STEPS_M, "model.mlp.preconditioner"}),
    "fig3a": (FULL, set()),
    "fig3b": (ATTENTION | {"model.attention.diagonal"}, {"model.attention.diagonal"}),
    "fig3c": (MLP | {STEPS_M, "model.mlp.dim"}, {STEPS_M, "model.mlp.dim"}),
    "fig4": (ATTENTION | {STEPS_A}, {STEPS_A}),
    "fig5": (FULL | {"model.layers"}, set()),
    "ours_gradient": (
        ATTENTION
        | {STEPS_A, "model.attention.preconditioner_heads", "model.attention.diagonal_in_update"},
        {
            "model.attention.preconditioner",
            "model.attention.preconditioner_heads",
            "model.attention.diagonal_in_update",
        },
    ),
    "ours_norm": (
        FULL | {"model.norm_gradient", "model.residual"},
        {"model.norm_gradient", "model.residual"},
    ),
    "ours_position": (ATTENTION | {STEPS_A}, {"model.attention.position"}),
    "ours_recursion": (ATTENTION | MLP | {STEPS_A, STEPS_M}, ATTENTION | MLP | {STEPS_A, STEPS_M}),
    "ours_step_size": (EITHER, EITHER),
    "ours_steps": (FULL, {STEPS_A, STEPS_M}),
    "ours_test_steps": (FULL, set()),
}

# size: Llama, CEM attention, CEM MLP, CEM MLP at 1.5 M, full CEM
PARAMETERS = {
    "86m": (86_371_488, 79_151_584, 76_737_696, 86_371_488, 70_082_272),
    "108m": (108_052_896, 97_223_088, 93_602_208, 108_052_896, 83_909_424),
    "134m": (134_105_856, 119_959_440, 115_231_488, 134_105_856, 102_384_528),
    "162m": (162_813_024, 144_907_632, 138_925_152, 162_813_024, 122_481_648),
}


def sweep_of(name, size="paper"):
    return read_sweep(str(FOLDER / "paper" / f"{name}.py"), size)


def config_of(figure, size, arm):
    """Resolve the configuration, at the size's own learning rate."""
    return config_of_size(sweep_of(figure, size), size, arm)


def config_of_size(sweep, size, arm):
    (run,) = (
        run
        for run in runs_of([sweep])
        for use in run.uses
        if (run.size, use.arm, use.rate) == (size, arm, 1)
    )
    return run.config


def changed(configs):
    """Return the fields in which some of the configurations differ."""
    values = [leaves(config) for config in configs]
    return {name for name in values[0] if len({repr(v[name]) for v in values}) > 1}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("size", ["86m", "mini", "0.3m"])
def test_arms_differ_in_what_the_figure_says(file, size):
    sweep = sweep_of(file.stem, size)
    assert sweep.name == file.stem
    llama = load_config(sweep.files[size])
    runs = runs_of([sweep])
    assert len(runs) == len(sweep.arms[size]) * len(sweep.rates)
    of_arm = {arm.name: [r for r in runs if r.uses[0].arm == arm.name] for arm in sweep.arms[size]}
    from_llama, among_cem = SAYS[file.stem]
    rate = {"optimizer.learning_rate"} if len(sweep.rates) > 1 else set()
    for same in of_arm.values():
        assert changed([run.config for run in same]) == rate
    first = [same[len(same) // 2].config for same in of_arm.values()]
    assert differences(llama, of_arm["Llama"][len(sweep.rates) // 2].config) == {}
    assert changed([llama, *first]) <= from_llama
    cem = [c for c in first if "cem" in (c.model.attention.kind, c.model.mlp.kind)]
    assert changed(cem) == among_cem


@pytest.mark.parametrize("size", PARAMETERS)
def test_parameters_of_the_papers_arms(size):
    llama, attention, mlp, wide, full = PARAMETERS[size]
    count = lambda *arm: pure.count(config_of(*arm).model)
    assert count("fig2a", size, "Llama") == llama
    assert count("fig2a", size, "CEM attention") == attention
    assert count("fig2b", size, "CEM MLP") == mlp
    assert count("fig2b", size, "CEM MLP, 1.5 M") == wide
    assert count("fig3a", size, "CEM, T = 2") == full
    assert count("fig3c", size, "plain reuse, twice") == llama
    assert count("fig4", size, "CEM attention, T = 2") == attention


def test_full_cem_is_the_shipped_configuration():
    shipped = load_config(str(FOLDER / "cem_86m.py"))
    assert differences(shipped, config_of("fig3a", "86m", "CEM, T = 2")) == {}


def test_sizes_and_learning_rates_of_the_paper():
    assert list(sweep_of("fig3a").arms) == ["86m", "108m", "134m", "162m"]
    assert list(sweep_of("fig5").arms) == ["256m"]
    for name in ("fig3a", "fig5"):
        rates = {run.config.optimizer.learning_rate for run in runs_of([sweep_of(name)])}
        assert rates == {0.0005, 0.001, 0.002, 0.004, 0.008}
    for run in runs_of([sweep_of("fig2c", "108m")]):
        assert run.config.train.tokens == 20 * PARAMETERS["108m"][0]
        assert run.config.optimizer.learning_rate == 0.002


def test_two_more_layers_at_256m():
    llama, cem = (config_of("fig5", "256m", arm) for arm in ("Llama", "CEM, T = 2"))
    assert (llama.model.layers, cem.model.layers) == (14, 16)
    assert pure.count(llama.model) == 254_957_472
    assert llama.train.tokens == cem.train.tokens == 20 * 254_957_472


def test_the_ladder_has_20_tokens_per_parameter_and_sublayers_as_strong_as_the_papers():
    sweep = sweep_of("fig2a", "ladder")
    counts = []
    for size, file in sweep.files.items():
        llama = load_config(file)
        counts.append(pure.count(llama.model))
        assert differences(llama, config_of_size(sweep, size, "Llama")) == {}
        assert llama.train.tokens == 20 * counts[-1]
        strength = llama.model.init_std * llama.model.dim**0.5
        assert strength == pytest.approx(0.02 * 672**0.5, rel=0.01)
    assert counts == [264_816, 646_344, 1_304_544, 2_636_928]
    one = sweep_of("ours_recursion", "0.6m")
    names = {run.name for run in runs_of([sweep_of("ours_recursion", "ladder")])}
    assert {run.name for run in runs_of([one])} < names


def test_shared_arms_are_one_run():
    names = lambda figure: {r.name for r in runs_of([sweep_of(figure, "mini")])}
    llama = names("fig2a") & names("fig2b")
    assert len(llama) == 1
    assert len(names("fig2a") & names("fig2c")) == 2  # Llama, and CEM attention without P
    assert names("fig4") & names("fig3a") == llama
    together = runs_of([sweep_of("fig2a", "mini"), sweep_of("fig2c", "mini")])
    assert {run.name for run in together} == names("fig2a") | names("fig2c")
    (shared,) = (run for run in together if run.name in llama)
    assert [use.figure for use in shared.uses] == ["fig2a", "fig2c"]


def test_an_unknown_size_is_told():
    with pytest.raises(UserError, match="size huge: no such size; there are paper, ladder, 86m"):
        sweep_of("fig2a", "huge")


def test_headers_give_the_command():
    for file in FILES:
        header = file.read_text().split('"""')[1]
        assert f"cem sweep --config configs/paper/{file.name} --workdir" in header


def test_all_figures_at_all_sizes_of_the_paper():
    sweeps = [read_sweep(str(file), "paper") for file in FILES]
    runs = runs_of(sweeps)
    places = sum(len(arms) * len(s.rates) for s in sweeps for arms in s.arms.values())
    assert sum(len(run.uses) for run in runs) == places
    assert len(runs) < places  # shared runs are run once
    for size, file in {run.size: run.file for run in runs}.items():
        (tokens,) = {run.config.train.tokens for run in runs if run.size == size}
        assert tokens == load_config(file).train.tokens
