"""The base classes of sublayers: a norm, and steps from the residual stream.

Shapes: B leading axes · J positions · D model dim · T steps.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from cem_jax.config import AttentionConfig, MLPConfig, ModelConfig
from cem_jax.energy import Loop, StepNorm, StepRule, at_state, descend, rms_norm, trajectory
from cem_jax.energy.descent import Force
from cem_jax.kernels import OUTPUT, target_platform
from cem_jax.model.parameters import norm_weight, number, step_size

# Unrolled, each step's residuals for the backward pass stay where they are instead of being copied
# into one stacked array. This saves a fifth of the time of a T = 2 training step on CPU, and three
# quarters of the temporaries at T = 8 on a TPU.
_UNROLLED = 8


class Sublayer(nnx.Module):
    """The settings and the norm of a sublayer."""

    def __init__(self, config: ModelConfig, settings: AttentionConfig | MLPConfig):
        self.settings = settings
        self.eps = config.norm_eps
        self.norm = norm_weight(config)

    def context(self, x: Float[Array, "*B J D"]) -> Float[Array, "*B J D"]:
        """Return h = RMSNorm(x)."""
        return rms_norm(x, self.norm[...], self.eps)


class CEMSublayer(Sublayer):
    """T steps down an energy from the residual stream; a subclass defines the energy.

    It has `frame(h)`, which computes what stays fixed over the steps; `force(u, frame)`, the
    preconditioned force at u; and `energy_at(u, frame)`.
    """

    def __init__(self, config: ModelConfig, settings: AttentionConfig | MLPConfig):
        super().__init__(config, settings)
        self.residual = config.residual
        self.norm_gradient = config.norm_gradient
        self.step_norm_kind = config.step_norm
        self.step_norm = norm_weight(config) if config.step_norm == "separate" else None
        self.eta = step_size(settings.step_size, settings.learn_step_size)

    def energy(
        self, x: Float[Array, "*B J D"], context: Float[Array, "*B J D"], **inputs: Any
    ) -> Float[Array, "*B J"]:
        """Return the energy at u = RMSNorm(x) in the context h, in float32 or better."""
        return self.energy_at(self.normed(x), self.frame(context, **inputs))

    def normed(self, x: Float[Array, "*B J D"]) -> Float[Array, "*B J D"]:
        """Return u = RMSNorm(x), at which energy and force are evaluated."""
        norm = self._norm()
        return x if norm is None else rms_norm(x, norm.weight, norm.eps)

    def update(
        self, x: Float[Array, "*B J D"], context: Float[Array, "*B J D"], **inputs: Any
    ) -> Float[Array, "*B J D"]:
        """Return the change in x of one step from rest at x: η F in the context h."""
        rule = self._rule()
        return rule.update(rule.start(x), self._force(self.frame(context, **inputs)))

    def __call__(
        self, x: Float[Array, "*B J D"], steps: int | None = None, **inputs: Any
    ) -> Float[Array, "*B J D"]:
        """Return x⁽ᵀ⁾ from x⁽⁰⁾ = x; `steps` overrides the configured T."""
        h = self.context(x)
        return self._descend(x, h, self.frame(h, **inputs), steps)

    def states(self, x: Float[Array, "*B J D"], **inputs: Any) -> Float[Array, "T+1 *B J D"]:
        """Return x⁽⁰⁾ … x⁽ᵀ⁾ from x⁽⁰⁾ = x; the last one is `__call__`'s result."""
        h = self.context(x)
        return self._descend(x, h, self.frame(h, **inputs), run=trajectory)

    def _norm(self) -> StepNorm | None:
        if self.step_norm_kind == "none":
            return None
        weights = {"shared": self.norm, "separate": self.step_norm, "weightless": None}
        weight = weights[self.step_norm_kind]
        return StepNorm(None if weight is None else weight[...], self.eps, self.norm_gradient)

    def _rule(self) -> StepRule:
        return StepRule(number(self.eta))

    def _force(self, frame: Any) -> Force:
        return at_state(lambda u: self.force(u, frame), self._norm())

    def _descend(self, x, h, frame, steps: int | None = None, run=descend):
        """Call `run`, which is `descend` or `trajectory`, from x in the context h."""
        start = x if self.residual == "prenorm" else h
        loop = _loop(self.settings.remat_steps)
        steps = steps or self.settings.steps
        return run(self._force(frame), start, self._rule(), steps=steps, loop=loop)


class ReusedSublayer(Sublayer):
    """A baseline sublayer, x + f(RMSNorm(x)), applied T times; a subclass defines f, `branch`."""

    def __call__(
        self, x: Float[Array, "*B J D"], steps: int | None = None, **inputs: Any
    ) -> Float[Array, "*B J D"]:
        """Return x after `steps` applications; default: the configured number."""
        force = lambda x: self.branch(self.context(x), **inputs)
        rule, steps = StepRule(1.0), steps or self.settings.steps
        if steps == 1:  # without a loop, XLA fuses the step with the operations around it
            return rule.result(rule.step(rule.start(x), force))
        return descend(force, x, rule, steps=steps, loop=Loop(unroll=1))


def positions_of(
    x: Float[Array, "*B J D"], start: Int[Array, ""] | int | None = None
) -> Int[Array, " J"]:
    """Return the positions 0, 1, …, J − 1; when decoding, `start`, `start` + 1, …"""
    positions = jnp.arange(x.shape[-2])
    return positions if start is None else positions + start


def _loop(remat: bool) -> Loop:
    """Return how to run the steps; `remat` keeps only states and attention's output of each."""
    if not remat:
        return Loop(_UNROLLED)
    keep = jax.checkpoint_policies.save_only_these_names(OUTPUT)
    # without a loop, XLA on CPU undoes rematerialisation
    unroll = 1 if target_platform() == "cpu" else _UNROLLED
    return Loop(unroll, partial(jax.checkpoint, policy=keep))
