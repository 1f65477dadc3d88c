"""The energies, their forces and the descent: pure functions of arrays.

No Flax, no configuration, no input or output; of the project only `kernels` is known here.
"""

from cem_jax.energy.activation import antiderivative
from cem_jax.energy.descent import StepNorm, descend
from cem_jax.energy.elementwise import elementwise_energy, elementwise_force
from cem_jax.energy.interaction import interaction_energy, interaction_force
from cem_jax.energy.norm import rms_norm
from cem_jax.energy.position import Rotary, alibi_slopes, rotate
from cem_jax.energy.preconditioner import (
    Preconditioner,
    extreme_eigenvalues,
    precondition,
    preconditioner_matrix,
)

__all__ = [
    "Preconditioner",
    "Rotary",
    "StepNorm",
    "alibi_slopes",
    "antiderivative",
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
]
