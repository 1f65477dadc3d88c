"""The energies, their forces and the descent: pure functions of arrays.

No Flax, no configuration, no I/O; the only project imports are `kernels` and `sharding`.
"""

from cem_jax.energy.activation import antiderivative
from cem_jax.energy.descent import Loop, State, StepRule, descend, trajectory
from cem_jax.energy.elementwise import elementwise_energy, elementwise_force
from cem_jax.energy.interaction import interaction_energy, interaction_force
from cem_jax.energy.norm import StepNorm, at_state, rms_norm
from cem_jax.energy.position import Rotary, alibi_slopes, rotate
from cem_jax.energy.preconditioner import (
    Preconditioner,
    extreme_eigenvalues,
    precondition,
    preconditioner_matrix,
)

__all__ = [
    "Loop",
    "Preconditioner",
    "Rotary",
    "State",
    "StepNorm",
    "StepRule",
    "alibi_slopes",
    "antiderivative",
    "at_state",
    "descend",
    "elementwise_energy",
    "elementwise_force",
    "extreme_eigenvalues",
    "interaction_energy",
    "interaction_force",
    "precondition",
    "preconditioner_matrix",
    "rms_norm",
    "rotate",
    "trajectory",
]
