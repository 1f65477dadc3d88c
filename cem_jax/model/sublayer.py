"""What every sublayer has: its norm, and for CEM sublayers the state that descends.

Shapes: B leading axes · J positions · D model dim.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cem_jax.config import ModelConfig
from cem_jax.energy import StepNorm, descend, rms_norm
from cem_jax.model.parameters import norm_weight, number, step_size


class CEMSublayer(nnx.Module):
    """T steps down an energy from the residual stream; subclasses say which energy.

    A subclass has `frame(h)`: what of the context h stays fixed over the steps; `force(u, frame)`,
    the preconditioned force at u; and `energy_at(u, frame)`.
    """

    def __init__(
        self, config: ModelConfig, *, steps: int, eta: float, learn_eta: bool, remat: bool
    ):
        self.residual = config.residual
        self.norm_gradient = config.norm_gradient
        self.step_norm_kind = config.step_norm
        self.eps = config.norm_eps
        self.steps = steps
        self.remat = remat
        self.norm = norm_weight(config)
        self.step_norm = norm_weight(config) if config.step_norm == "separate" else None
        self.eta = step_size(eta, learn_eta)

    def context(self, x: Float[Array, "*B J D"]) -> Float[Array, "*B J D"]:
        """h = RMSNorm(x), fixed over the steps."""
        return rms_norm(x, self.norm[...], self.eps)

    def energy(self, x: Float[Array, "*B J D"], context: Float[Array, "*B J D"], **inputs) -> Array:
        """The energy of state x in the context h, at u = RMSNorm(x). [*B J], float32 or better."""
        return self.energy_at(self.normed(x), self.frame(context, **inputs))

    def normed(self, x: Float[Array, "*B J D"]) -> Float[Array, "*B J D"]:
        """u = RMSNorm(x), the state as energy and force take it."""
        norm = self._norm()
        return x if norm is None else rms_norm(x, norm.weight, norm.eps)

    def update(
        self, x: Float[Array, "*B J D"], context: Float[Array, "*B J D"], **inputs
    ) -> Float[Array, "*B J D"]:
        """One step's x⁽ᵗ⁺¹⁾ − x⁽ᵗ⁾ = η F in the context h."""
        return self._descend(x, self.frame(context, **inputs), steps=1) - x

    def __call__(
        self, x: Float[Array, "*B J D"], steps: int | None = None, **inputs
    ) -> Float[Array, "*B J D"]:
        """x⁽ᵀ⁾ from x⁽⁰⁾ = x; `steps` in place of the configured T."""
        h = self.context(x)
        start = x if self.residual == "prenorm" else h
        return self._descend(start, self.frame(h, **inputs), steps=steps or self.steps)

    def states(self, x: Float[Array, "*B J D"], **inputs) -> Float[Array, "T+1 *B J D"]:
        """x⁽⁰⁾ … x⁽ᵀ⁾ from x⁽⁰⁾ = x; the last one is `__call__`'s result."""
        h = self.context(x)
        frame = self.frame(h, **inputs)
        states = [x if self.residual == "prenorm" else h]
        for _ in range(self.steps):
            states.append(self._descend(states[-1], frame, steps=1))
        return jnp.stack(states)

    def _norm(self) -> StepNorm | None:
        if self.step_norm_kind == "none":
            return None
        weights = {"shared": self.norm, "separate": self.step_norm, "weightless": None}
        weight = weights[self.step_norm_kind]
        return StepNorm(None if weight is None else weight[...], self.eps, self.norm_gradient)

    def _descend(self, x, frame, *, steps: int):
        return descend(
            lambda u: self.force(u, frame),
            x,
            steps=steps,
            step_size=number(self.eta),
            norm=self._norm(),
            remat=self.remat,
        )


class ReusedSublayer(nnx.Module):
    """A baseline sublayer x + f(RMSNorm(x)); with `steps` > 1 the whole of it is applied again."""

    def __init__(self, config: ModelConfig, *, steps: int):
        self.eps = config.norm_eps
        self.steps = steps
        self.norm = norm_weight(config)

    def __call__(
        self, x: Float[Array, "*B J D"], steps: int | None = None, **inputs
    ) -> Float[Array, "*B J D"]:
        """x after `steps` applications (default: as configured)."""

        def apply(x, _):
            return x + self.branch(rms_norm(x, self.norm[...], self.eps), **inputs), None

        steps = steps or self.steps
        return apply(x, None)[0] if steps == 1 else jax.lax.scan(apply, x, length=steps)[0]


def positions_of(x: Float[Array, "*B J D"], start: Array | None) -> Array:
    """[J]: 0, 1, …, or from `start` on when decoding."""
    positions = jnp.arange(x.shape[-2])
    return positions if start is None else positions + start
