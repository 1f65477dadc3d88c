"""CEM MLP: T steps down the element-wise energy.

Shapes: B leading axes · J positions · D model dim · M MLP dim.
"""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from cem_jax.config import ModelConfig
from cem_jax.energy import precondition
from cem_jax.energy.elementwise import hidden_energy, hidden_force
from cem_jax.model.parameters import matrix, preconditioner
from cem_jax.model.sublayer import CEMSublayer
from cem_jax.sharding.linear import project, readout


class Frame(NamedTuple):
    """What stays fixed over the steps: functions of h and of the weights."""

    gamma: Float[Array, "*B J M"]
    folded: Float[Array, "M D"]  # tied P


class CEMMLP(CEMSublayer):
    """x + Σ_t η P tiedᵀ(γ ∘ σ(tied u)): a gated MLP as gradient steps on ξ (Eq. 15, 17)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config.mlp
        super().__init__(config, c)
        shape, axes = (c.dim, config.dim), ("mlp", "embed")
        self.multiplier = matrix(rngs, shape, axes, config.init_std)
        self.tied = matrix(rngs, shape, axes, config.init_std)
        self.preconditioner = preconditioner(c, config.dim, None, rngs)

    def frame(self, h: Float[Array, "*B J D"]) -> Frame:
        """Return γ = multiplier h, and the tied weight with the preconditioner folded in."""
        p = None if self.preconditioner is None else self.preconditioner.factors()
        return Frame(project(h, self.multiplier[...]), precondition(self.tied[...], p))

    def force(self, u: Float[Array, "*B J D"], frame: Frame) -> Float[Array, "*B J D"]:
        """Return F(u) = P tiedᵀ(γ ∘ σ(tied u)) (Eq. 15)."""
        z = project(u, self.tied[...])
        force = hidden_force(
            z, frame.gamma, activation=self.settings.activation, update=self.settings.update
        )
        return readout(force, frame.folded)

    def energy_at(self, u: Float[Array, "*B J D"], frame: Frame) -> Float[Array, "*B J"]:
        """Return ξ(u_i | h_i) (Eq. 7)."""
        z = project(u, self.tied[...])
        return hidden_energy(z, frame.gamma, activation=self.settings.activation)
