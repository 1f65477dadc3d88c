"""Log-partition functions of attention scores, and their derivatives.

Attention is the derivative of a log-partition function. With

    s_ijk = (k_jk·q_ik + g_i·h_j)/τ − m_k(i−j) + β_k[i=j]        lse_ik = log Σ_{j≤i} exp s_ijk

∂lse_ik/∂q_ik = o_ik/τ, o_ik = Σ_j softmax_j(s_ijk) k_jk: attention with its keys as values. So
`jax.grad` of an energy −τ Σ_k lse_ik runs the fused kernel, and training differentiates that;
`dispatch` explains how. `call` has the records that pass from a layer to a kernel.

Of the other packages, this one imports only `sharding`.
"""

from cem_jax.kernels.call import IMPLEMENTATIONS, Call, Options, Outputs, Scores
from cem_jax.kernels.dense import attend_cached
from cem_jax.kernels.dispatch import (
    FUSED_PLATFORMS,
    OUTPUT,
    Unavailable,
    attend,
    log_partition,
    target_platform,
    total_log_partition,
)

__all__ = [
    "FUSED_PLATFORMS",
    "IMPLEMENTATIONS",
    "OUTPUT",
    "Call",
    "Options",
    "Outputs",
    "Scores",
    "Unavailable",
    "attend",
    "attend_cached",
    "log_partition",
    "target_platform",
    "total_log_partition",
]
