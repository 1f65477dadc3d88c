"""What the paper's figures replace in a Llama. Each function returns a changed copy.

Unless a figure says otherwise: diagonal shared by the heads, ALiBi, self bias, no preconditioner.
"""

from typing import Any

from ml_collections import ConfigDict

PRECONDITIONERS = {  # the field's value: as figures call it
    "none": "no P",
    "diagonal": "diagonal P",
    "diagonal_low_rank": "diagonal and low-rank P",
}


def cem_attention(
    c: ConfigDict,
    *,
    steps: int = 1,
    diagonal: str = "shared",
    position: str = "alibi",
    preconditioner: str = "none",
    **fields: Any,
) -> ConfigDict:
    """CEM attention of the same width and heads, T = `steps`. `fields`: of model.attention."""
    c = c.copy_and_resolve_references()
    c.model.attention.update(
        kind="cem",
        steps=steps,
        diagonal=diagonal,
        position=position,
        self_bias=True,
        preconditioner=preconditioner,
        **fields,
    )
    return c


def cem_mlp(
    c: ConfigDict, *, steps: int = 1, preconditioner: str = "none", width: float = 1
) -> ConfigDict:
    """CEM MLP, T = `steps`, `width` times as wide as the gated one; 1.5: as many parameters."""
    c = c.copy_and_resolve_references()
    dim = round(width * c.model.mlp.dim)
    c.model.mlp.update(kind="cem", dim=dim, steps=steps, preconditioner=preconditioner)
    return c


def full_cem(c: ConfigDict, *, steps: int = 2) -> ConfigDict:
    """Both sublayers CEM's, with the full preconditioners: configs/cem_86m.py and its like."""
    c = cem_attention(c, steps=steps, preconditioner="diagonal_low_rank")
    return cem_mlp(c, steps=steps, preconditioner="diagonal_low_rank")


def reuse_attention(c: ConfigDict, times: int) -> ConfigDict:
    """Plain reuse: the whole attention sublayer, residual included, applied so many times."""
    c = c.copy_and_resolve_references()
    c.model.attention.steps = times
    return c


def reuse_mlp(c: ConfigDict, times: int) -> ConfigDict:
    """Plain reuse of the MLP sublayer."""
    c = c.copy_and_resolve_references()
    c.model.mlp.steps = times
    return c
