"""T steps down an energy (Eq. 16–17): x⁽ᵗ⁺¹⁾ = x⁽ᵗ⁾ + η F(u⁽ᵗ⁾), u = RMSNorm(x).

Shapes: B leading axes · D model dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from cem_jax.energy.norm import force_at_state, rms_norm
from cem_jax.kernels import OUTPUT, target_platform

# Unrolled, what the backward pass needs of each step stays where it is instead of being copied into
# one stacked array: on CPU a fifth of a T = 2 training step's time, on a TPU at T = 8 three
# quarters of its temporaries.
_UNROLLED = 8


class StepNorm(NamedTuple):
    """The norm inside the recursion."""

    weight: Float[Array, " D"] | None  # None: no learned weight
    eps: float
    gradient: str = "at_u"  # at_u | scaled | full: where the force is taken


def descend(
    force: Callable[[Float[Array, "*B D"]], Float[Array, "*B D"]],
    x: Float[Array, "*B D"],
    *,
    steps: int,
    step_size: float | Float[Array, ""],
    norm: StepNorm | None,
    remat: bool = False,
) -> Float[Array, "*B D"]:
    """x after `steps` steps of the same force; `norm` None evaluates it at x itself.

    `remat` recomputes each step in the backward pass: kept are the states between steps, and what
    attention gave out.
    """

    def step(x, _):
        if norm is None:
            moved = force(x)
        else:
            moved = force_at_state(force(rms_norm(x, norm.weight, norm.eps)), x, *norm)
        return x + (step_size * moved).astype(x.dtype), None

    keep = jax.checkpoint_policies.save_only_these_names(OUTPUT)
    body = jax.checkpoint(step, policy=keep) if remat else step
    # XLA on CPU undoes rematerialisation where there is no loop
    unroll = 1 if remat and target_platform() == "cpu" else min(steps, _UNROLLED)
    return jax.lax.scan(body, x, length=steps, unroll=unroll)[0]
