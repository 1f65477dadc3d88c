"""Every row passes on every kind of model; the contents of the cases."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from verify_cases import CONFIGS, failing, layer_rows, small, small_config

from cem_jax.config import load_config
from cem_jax.verify import forces, plain, whole
from cem_jax.verify.case import config_case, random_case, small_case

# Together they cover every value of every switch.
SWITCHES = {
    "exact diagonal, no P, closed form": {
        "model.attention.diagonal_in_update": "True",
        "model.attention.preconditioner": "none",
        "model.attention.update": "closed_form",
        "model.attention.implementation": "dense",
        "model.attention.alibi_slopes": "press",
        "model.attention.heads": "4",
        "model.mlp.preconditioner": "none",
        "model.mlp.update": "closed_form",
        "model.mlp.activation": "relu",
        "model.residual": "normalized",
        "model.step_norm": "separate",
        "model.norm_gradient": "full",
        "model.remat": "full",
    },
    "exact diagonal a head, P a head, no norm": {
        "model.attention.diagonal": "per_head",
        "model.attention.diagonal_in_update": "True",
        "model.attention.position": "none",
        "model.attention.self_bias": "False",
        "model.attention.preconditioner_form": "psd",
        "model.attention.remat_steps": "True",
        "model.attention.tau": "0.9",
        "model.mlp.activation": "gelu",
        "model.mlp.preconditioner_form": "psd",
        "model.mlp.remat_steps": "True",
        "model.step_norm": "none",
        "model.tie_embeddings": "True",
    },
    "rotary, shared P, learned steps": {
        "model.attention.position": "rope",
        "model.attention.diagonal_in_update": "True",
        "model.attention.preconditioner_heads": "shared",
        "model.attention.learn_step_size": "True",
        "model.attention.steps": "3",
        "model.attention.implementation": "blockwise",
        "model.mlp.learn_step_size": "True",
        "model.mlp.preconditioner": "diagonal",
        "model.mlp.steps": "1",
        "model.step_norm": "weightless",
        "model.norm_gradient": "full",
        "model.scan_layers": "False",
    },
    "no diagonal, diagonal P, scaled, documents": {
        "model.attention.diagonal": "none",
        "model.attention.preconditioner": "diagonal",
        "model.attention.tau": "sqrt_model_dim",
        "model.norm_gradient": "scaled",
        "model.remat": "dots",
        "data.document_mask": "True",
    },
    "CEM attention, gated MLP": {"model.mlp.kind": "gated", "model.mlp.activation": "gelu"},
    "Llama attention, CEM MLP": {
        "model.attention.kind": "llama",
        "model.attention.position": "rope",
        "model.attention.self_bias": "False",
    },
    "Llama, reused": {
        "model.attention.kind": "llama",
        "model.mlp.kind": "gated",
        "model.attention.steps": "2",
        "model.mlp.steps": "3",
    },
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_every_row_passes(switches):
    rows = list(layer_rows(small(**switches)))
    assert rows
    assert not [row for row in rows if not row.passed]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_passes_within_a_tolerance_that_mistakes_exceed(dtype):
    rows = list(layer_rows(small((dtype,))))
    assert not [row for row in rows if not row.passed and row.dtype == dtype]
    assert max(row.tolerance for row in rows) < {"float32": 1e-4, "bfloat16": 0.5}[dtype]


def test_one_position_and_heads_of_width_one():
    case = small(positions=1, **{"model.dim": "4", "model.attention.heads": "4"})
    assert not failing([*forces.attention_rows(case), *forces.mlp_rows(case)])
    assert not failing(whole.whole_rows(case))


class TestCases:
    def test_the_config_keeps_its_sizes(self):
        config = load_config(str(CONFIGS / "cem_86m.py"))
        case = config_case(config)
        assert case.shape == "J16 D672 K8 R84 M1792 T2+2"
        assert case.dtypes == ("float64", "float32", "bfloat16")
        assert case.model.layers == 1
        unchanged = replace(
            case.model,
            layers=config.model.layers,
            vocab_size=config.model.vocab_size,
            attention=config.model.attention,
        )
        assert unchanged == config.model
        assert replace(case.model.attention, block_sizes=None) == config.model.attention

    def test_small_cases_keep_the_switches_and_random_ones_draw_them(self):
        drawn = set()
        for seed in range(8):
            config = small_config(seed=str(seed), **{"model.attention.position": "rope"})
            case = small_case(config)
            assert case.model.attention.position == "rope"
            assert case.model.head_dim % 2 == 0
            drawn.add(random_case(config).switches)
        assert len(drawn) > 4

    def test_no_parameter_is_zero_and_p_is_positive_definite(self):
        case = small(**{"model.step_norm": "separate", "model.attention.learn_step_size": "True"})
        for leaf in jax.tree.leaves(case.parameters):
            assert leaf.dtype == np.float32
            assert np.all(leaf != 0)
        factors = case.layer("attention")["preconditioner"]
        with jax.enable_x64(True):
            for k in range(case.model.attention.heads):
                one = {name: leaf[k].astype(np.float64) for name, leaf in factors.items()}
                matrix = np.asarray(plain.preconditioner(one, case.model.dim))
                assert np.linalg.eigvalsh(matrix)[0] > 0
