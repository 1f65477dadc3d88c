"""One differentiable attention over several implementations.

An implementation is a module with two pure functions and, if fused, an objection:

    forward(inputs, plan) -> (lse, o, a)
    backward(inputs, plan, lse, o, a, (dlse, do, da)) -> gradients, an `Inputs`
    obstacle(inputs, plan) -> why it cannot serve this call, or None

Where it can work for some of a sequence's queries, both functions take their `Chunks` at last.
What is kept between the two passes is what the backward pass takes: the inputs, lse, o, a.
"""

import logging
from functools import cache, partial
from importlib import import_module

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cem_jax.kernels import blockwise, dense, split_positions
from cem_jax.kernels.call import Inputs, Plan
from cem_jax.kernels.over_mesh import (
    Split,
    backward_over_mesh,
    forward_over_mesh,
    share,
    split_in_use,
)

# "pallas" is the fused kernel of the platform that the program is compiled for
IMPLEMENTATIONS = ("auto", "dense", "blockwise", "pallas")
# for `jax.checkpoint` policies: what is dear to compute again and cheap to keep, lse, o and a
OUTPUT = "attention"
FUSED_PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}  # platform: module

_OVER_MESH = {"forward": forward_over_mesh, "backward": backward_over_mesh}
_log = logging.getLogger(__name__)


class Unavailable(ValueError):
    """It was demanded and cannot run, or `mesh.context` cannot split the call; why is said."""


def attend(implementation: str, inputs: Inputs, plan: Plan):
    """(lse, o, a) of `kernels.attend`, with any leading axes."""
    if implementation == "dense":
        return dense.attend(inputs, plan.tau, plan.context)
    leading = inputs.q.shape[:-3]
    lse, o, a = _attend(implementation, plan, _one_leading_axis(inputs))
    restore = lambda x: x.reshape(*leading, *x.shape[1:])
    return restore(lse), restore(o), None if a is None else restore(a)


def _one_leading_axis(inputs: Inputs) -> Inputs:
    count = inputs.q.ndim - 3
    flat = lambda x: None if x is None else x.reshape(-1, *x.shape[count:])
    return Inputs(*map(flat, inputs[:5]), inputs.slopes, inputs.self_bias, flat(inputs.segments))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(implementation: str, plan: Plan, inputs: Inputs):
    return _compute(implementation, plan, "forward", inputs)


def _keep(implementation: str, plan: Plan, inputs: Inputs):
    outputs = _attend(implementation, plan, inputs)  # so that this pass has a derivative too
    outputs = jax.tree.map(lambda x: checkpoint_name(x, OUTPUT), outputs)
    return outputs, (inputs, *outputs)


def _pull_back(implementation: str, plan: Plan, kept, cotangents):
    return (_backward(implementation, plan, *kept, cotangents),)


_attend.defvjp(_keep, _pull_back)


# A fused backward pass has no derivative of its own. Where one is asked for (training does not),
# it is that of the blockwise one, which is plain JAX.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward(implementation: str, plan: Plan, inputs: Inputs, lse, o, a, cotangents) -> Inputs:
    return _compute(implementation, plan, "backward", inputs, lse, o, a, cotangents)


def _plain_backward(plan: Plan, inputs: Inputs, *rest) -> Inputs:
    return blockwise.backward(inputs, _plain(plan), *rest)


_backward.defvjp(
    lambda implementation, plan, *kept: (_backward(implementation, plan, *kept), kept),
    lambda implementation, plan, kept, bar: jax.vjp(partial(_plain_backward, plan), *kept)[1](bar),
)


# Jitted, so that the kernels of equal layers and steps are traced once.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _compute(implementation: str, plan: Plan, direction: str, inputs: Inputs, *rest):
    return _choose(implementation, plan, inputs, direction)(inputs, *rest)


def _choose(implementation: str, plan: Plan, inputs: Inputs, direction: str):
    """The forward or the backward function, of the platform that the program is compiled for."""
    split = split_in_use()
    if split.ways("sequence") > 1:
        _check_positions(inputs, split)
        plain = _over_mesh(blockwise, direction, _plain(plan))
    else:
        plain = partial(_run, blockwise, direction, _plain(plan))
    if implementation == "blockwise":
        return plain
    demanded = implementation == "pallas"
    target = "tpu" if plan.interpret else target_platform()
    branches = {}
    for platform, name in FUSED_PLATFORMS.items():
        if platform == "cuda" != target:
            continue  # Triton's lowering asks for the GPU it is meant for
        reason = _obstacle(name, inputs, plan)
        if reason is None:
            branches[platform] = _over_mesh(_module(name), direction, plan)
        elif platform == target:
            if demanded:
                raise Unavailable(f"'pallas' cannot run: {reason}")
            _say_once(f"attention runs blockwise instead of fused: {reason}")
    if not demanded:
        return partial(_by_platform, branches, plain)
    if target not in FUSED_PLATFORMS:
        raise Unavailable(
            f"'pallas' needs a TPU or a GPU, and this program is for {target}; "
            "'auto' takes what each platform has"
        )
    return branches[target]


def _check_positions(inputs: Inputs, split: Split) -> None:
    reason = split_positions.obstacle(inputs.q.shape[1], split.ways("sequence"))
    if reason is None and isinstance(part := share(inputs, split), str):
        reason = part
    if reason:
        raise Unavailable(reason)


def _by_platform(branches, plain, *arguments):
    return lax.platform_dependent(*arguments, default=plain, **branches)


def _run(module, direction: str, plan: Plan, inputs: Inputs, *rest):
    return getattr(module, direction)(inputs, plan, *rest)


def _over_mesh(module, direction: str, plan: Plan):
    compute, split = getattr(module, direction), split_in_use()
    if split.ways("sequence") > 1:
        over = dict(axis=split.axes("sequence"), devices=split.ways("sequence"))
        compute = partial(getattr(split_positions, direction), compute, **over)
    return _OVER_MESH[direction](compute, plan)


def _module(name: str):
    return import_module(f"cem_jax.kernels.{name}")


def _obstacle(name: str, inputs: Inputs, plan: Plan) -> str | None:
    part = share(inputs, split_in_use())
    if isinstance(part, str):
        return part
    return _module(name).obstacle(part, plan)


def _plain(plan: Plan) -> Plan:
    return plan._replace(interpret=None)


def target_platform() -> str:
    """cpu, tpu or cuda: of the mesh in use where it names a device, else of JAX's own devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "cuda" if platform == "gpu" else platform


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
