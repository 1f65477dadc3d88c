"""T steps down an energy: a step rule, and the loop that runs it.

A rule says how a force moves a state: here x⁽ᵗ⁺¹⁾ = x⁽ᵗ⁾ + η F(x⁽ᵗ⁾) (Eq. 16–17). A rule with
memory keeps it in its state, beside x, and only needs its own `start`, `update`, `step` and
`result`: `descend` and `trajectory` run any rule.

Shapes: B leading axes · D model dim · T steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Force = Callable[[Float[Array, "*B D"]], Float[Array, "*B D"]]  # F(x) at a state x


class State(NamedTuple):
    """What each step passes to the next."""

    x: Float[Array, "*B D"]


class StepRule(NamedTuple):
    """Gradient descent with step size η."""

    step_size: float | Float[Array, ""]

    def start(self, x: Float[Array, "*B D"]) -> State:
        """Return the initial state: at rest at x."""
        return State(x)

    def update(self, state: State, force: Force) -> Float[Array, "*B D"]:
        """Return the change in x of one step from `state`, η F(x), in the dtype of x."""
        return (self.step_size * force(state.x)).astype(state.x.dtype)

    def step(self, state: State, force: Force) -> State:
        """Return the state after one step."""
        return State(state.x + self.update(state, force))

    def result(self, state: State) -> Float[Array, "*B D"]:
        """Return the x that a state represents."""
        return state.x


class Loop(NamedTuple):
    """How to run the steps: affects time and memory, not the result."""

    unroll: int = 8  # steps to unroll per iteration
    remat: Callable[[Callable], Callable] | None = None  # wraps the step, like jax.checkpoint


def descend(
    force: Force,
    x: Float[Array, "*B D"],
    rule: StepRule,
    *,
    steps: int,
    loop: Loop = Loop(),  # noqa: B008 - immutable
) -> Float[Array, "*B D"]:
    """Return x⁽ᵀ⁾ after T = `steps` steps of `rule` under `force`, starting at rest at `x`."""
    end, _ = _run(force, rule.start(x), rule, steps, loop, lambda state: None)
    return rule.result(end)


def trajectory(
    force: Force,
    x: Float[Array, "*B D"],
    rule: StepRule,
    *,
    steps: int,
    loop: Loop = Loop(),  # noqa: B008 - immutable
) -> Float[Array, "T+1 *B D"]:
    """Return x⁽⁰⁾ … x⁽ᵀ⁾ of these steps; the last one is the result of `descend`."""
    start = rule.start(x)
    _, after = _run(force, start, rule, steps, loop, rule.result)
    return jnp.concatenate([rule.result(start)[None], after])


def _run(force: Force, start: State, rule: StepRule, steps: int, loop: Loop, look: Callable):
    """Return the state after the last step, and `look(state)` after each step, stacked."""

    def step(state: State, _):
        state = rule.step(state, force)
        return state, look(state)

    body = step if loop.remat is None else loop.remat(step)
    return jax.lax.scan(body, start, length=steps, unroll=min(steps, loop.unroll))
