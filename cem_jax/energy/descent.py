"""T steps down an energy: a step rule, and the loop that runs it.

A rule says how a state moves under a force: here x⁽ᵗ⁺¹⁾ = x⁽ᵗ⁾ + η F(x⁽ᵗ⁾) (Eq. 16–17). A rule with
memory keeps it in `State`, beside x, and differs in `start`, `update`, `step` and `result` alone:
`descend` and `trajectory` run any rule.

Shapes: B leading axes · D model dim · T steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Force = Callable[[Float[Array, "*B D"]], Float[Array, "*B D"]]  # at a state x


class State(NamedTuple):
    """What a step passes to the next."""

    x: Float[Array, "*B D"]


class StepRule(NamedTuple):
    """Gradient descent with step size η."""

    step_size: float | Float[Array, ""]

    def start(self, x: Float[Array, "*B D"]) -> State:
        """Return the state at rest in x."""
        return State(x)

    def update(self, state: State, force: Force) -> Float[Array, "*B D"]:
        """Return what the step from `state` adds to x, in the dtype of x."""
        return (self.step_size * force(state.x)).astype(state.x.dtype)

    def step(self, state: State, force: Force) -> State:
        """Return the state after one step."""
        return State(state.x + self.update(state, force))

    def result(self, state: State) -> Float[Array, "*B D"]:
        """Return the x that is read out of a state."""
        return state.x


class Loop(NamedTuple):
    """How the steps are run: this changes time and memory, not the result."""

    unroll: int = 8  # steps written out at a time
    remat: Callable[[Callable], Callable] | None = None  # applied to the step, as jax.checkpoint


def descend(
    force: Force,
    x: Float[Array, "*B D"],
    rule: StepRule,
    *,
    steps: int,
    loop: Loop = Loop(),  # noqa: B008 - immutable
) -> Float[Array, "*B D"]:
    """Return x⁽ᵀ⁾ after T = `steps` steps of `rule` under `force`, from rest in `x`."""
    nothing = lambda state: None
    end, _ = _run(force, rule.start(x), rule, steps, loop, nothing)
    return rule.result(end)


def trajectory(
    force: Force,
    x: Float[Array, "*B D"],
    rule: StepRule,
    *,
    steps: int,
    loop: Loop = Loop(),  # noqa: B008 - immutable
) -> Float[Array, "T+1 *B D"]:
    """Return x⁽⁰⁾ … x⁽ᵀ⁾ of the same steps; the last one is the result of `descend`."""
    start = rule.start(x)
    _, after = _run(force, start, rule, steps, loop, rule.result)
    return jnp.concatenate([rule.result(start)[None], after])


def _run(force: Force, start: State, rule: StepRule, steps: int, loop: Loop, look: Callable):
    """The state after the last step, and what `look` takes of the state after each, stacked."""

    def step(state: State, _):
        state = rule.step(state, force)
        return state, look(state)

    body = step if loop.remat is None else loop.remat(step)
    return jax.lax.scan(body, start, length=steps, unroll=min(steps, loop.unroll))
