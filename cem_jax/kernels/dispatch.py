"""The log-partition function, its derivatives, and the choice of implementation.

A training loss uses the same kernels at three levels, each a custom_vjp here.

1. `_log_partition`, lse. Used by an energy: `force_on_query` differentiates −τ Σ_k lse_ik with
   respect to q, and to g where the diagonal's gradient is in the update. That derivative is
   attention itself,

       ∂lse_ik/∂q_ik = o_ik/τ        ∂lse_ik/∂g_ik = a_ik/τ

   so its forward pass runs one kernel, which returns lse, o and a, and its backward pass only
   multiplies. With `update="closed_form"` a layer calls `attend` and there is no level 1. Other
   gradients of lse than these two go through level 2.

2. `_attend`, (lse, o, a). Used by training: the loss's gradient reaches the o and a of level 1, or
   of `attend`, and from there q, k, v, g, h and the biases. It keeps the call and its outputs
   (named `OUTPUT` for rematerialization) and runs the backward kernel of the same implementation.

3. `_attend_backward`, the gradients. Differentiated only by Hessians and tests, never in training.
   Backward kernels have no derivative of their own, so the derivative used is that of blockwise's
   backward pass: plain JAX, differentiable to any order.

Levels 2 and 3 choose the implementation when they are traced: the fused kernels of the platform
that the program is compiled for if they can run the call, else blockwise; each device of the mesh
in use computes its part. "dense" bypasses all this: plain JAX at every level and in both modes.

Every function takes (call, options, …). Shapes: B leading axes · J positions · K heads ·
R head dim · D model dim.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal
from jaxtyping import Array, Float, Int

from cem_jax.kernels import blockwise, dense
from cem_jax.kernels.call import Call, Implementation, Options, Outputs, Scores, checked
from cem_jax.kernels.over_mesh import over_mesh
from cem_jax.sharding.layout import split_in_use

# for `jax.checkpoint` policies: lse, o and a, expensive to recompute and cheap to keep
OUTPUT = "attention"
_log = logging.getLogger(__name__)


class Unavailable(ValueError):
    """The requested implementation cannot run this call, or the mesh cannot split its positions.

    The message says why.
    """


def log_partition(
    q: Float[Array, "*B J K R"],
    k: Float[Array, "*B J K R"],
    g: Float[Array, "*B J D"] | Float[Array, "*B J K D"] | None = None,
    h: Float[Array, "*B J D"] | None = None,
    *,
    tau: float,
    slopes: Float[Array, " K"] | None = None,
    self_bias: Float[Array, " K"] | None = None,
    segments: Int[Array, "*B J"] | None = None,
    implementation: str = "auto",
    block_sizes: tuple[int, int] | None = None,
    interpret: bool | None = None,
) -> Float[Array, "*B K J"]:
    """Return lse_ik = log Σ_{j≤i} exp s_ijk (`call.Scores`), in float32 (float64 for float64).

    Twice differentiable in every floating argument. A position sees itself and those before it,
    within its own segment if `segments` are given. `g` = d∘u and `h` carry the diagonal of the
    interaction matrix; a `g` without head axis is shared by the heads, its tile computed once.
    `implementation`: dense (all scores materialized), blockwise (O(J) memory, any platform), pallas
    (the fused kernel of a TPU or a GPU), or auto: fused if possible, else blockwise.
    `block_sizes`: positions per query and key block. `interpret`: run the TPU kernel in Pallas'
    interpreter. `tau` is a number, not differentiated. Raises ValueError if shapes do not match,
    `Unavailable` if pallas is requested and cannot run.
    """
    call = Call(q=q, k=k, g=g, h=h, scores=Scores(slopes, self_bias, segments))
    options = Options(
        tau, implementation=implementation, block_sizes=block_sizes, interpret=interpret
    )
    return _differentiable(options).log_partition(checked(call), options, False)


def total_log_partition(call: Call, options: Options) -> Float[Array, "*B J"]:
    """Return Σ_k lse_ik, which is all an energy needs.

    Since the heads are summed, the derivative with respect to a shared `g` is one vector
    Σ_k Σ_j α_ijk h_j per position instead of one per head. Raises as `log_partition` does.
    """
    return _differentiable(options).log_partition(checked(call), options, True)


def attend(call: Call, options: Options) -> Outputs:
    """Return lse, o and a, from which the derivatives of the log-partition function are formed.

    Raises as `log_partition` does, and ValueError if `options.average` has no h to average.
    """
    call = checked(call)
    if options.average != "none" and call.h is None:
        raise ValueError(f"average={options.average!r} averages h, which is not given")
    return _differentiable(options).attend(call, options)


class _Differentiable(NamedTuple):
    """Two functions of (call, options) that JAX can differentiate."""

    log_partition: Callable[[Call, Options, bool], Array]  # the last: summed over heads
    attend: Callable[[Call, Options], Outputs]


def _differentiable(options: Options) -> _Differentiable:
    return _DENSE if options.implementation == "dense" else _CHOSEN


def _dense_log_partition(call: Call, options: Options, head_sum: bool):
    lse_BKJ = dense.log_partition(call, options)
    return lse_BKJ.sum(-2) if head_sum else lse_BKJ


def _attend_leading(call: Call, options: Options) -> Outputs:
    """Run `_attend` with any leading axes."""
    leading = call.q.shape[:-3]
    flat = lambda x: x.reshape(-1, *x.shape[len(leading) :])
    restored = lambda x: x.reshape(*leading, *x.shape[1:])
    scores = call.scores
    if scores.segments is not None:
        scores = scores._replace(segments=flat(scores.segments))
    return jax.tree.map(restored, _attend(call.map(flat)._replace(scores=scores), options))


# Level 1: the log-partition function.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _log_partition(call: Call, options: Options, head_sum: bool):
    lse_BKJ = _attend_leading(call, options).lse
    return lse_BKJ.sum(-2) if head_sum else lse_BKJ


def _log_partition_forward(primals: Call, options: Options, head_sum: bool):
    is_primal = lambda x: isinstance(x, CustomVJPPrimal)
    call = jax.tree.map(lambda p: p.value, primals, is_leaf=is_primal)
    paths = jax.tree_util.tree_leaves_with_path(primals, is_leaf=is_primal)
    asked = {path[0].name for path, p in paths if p.perturbed}
    # An energy's gradient with respect to the state needs only q, perhaps g: then attention itself
    # is the derivative. Anything else takes attention's own backward pass.
    shared_g = call.g is not None and not call.per_head
    if asked <= {"q", "g"} and (head_sum or not shared_g or "g" not in asked):
        if "g" in asked:
            options = replace(options, average="summed" if shared_g else "per_head")
        outputs = _attend_leading(call, options)
        lse_BKJ, kept = outputs.lse, (call, outputs, None)
    else:
        alone = lambda call: _attend_leading(call, options).lse
        lse_BKJ, pull_back = jax.vjp(alone, call)
        kept = (call, None, pull_back)
    return (lse_BKJ.sum(-2) if head_sum else lse_BKJ), kept


def _log_partition_backward(options: Options, head_sum: bool, kept, lse_bar):
    call, outputs, pull_back = kept
    bar_BKJ = lse_bar
    if head_sum:
        shape = (*lse_bar.shape[:-1], call.q.shape[-2], lse_bar.shape[-1])
        bar_BKJ = jnp.broadcast_to(lse_bar[..., None, :], shape)
    if pull_back is not None:
        return pull_back(bar_BKJ)
    scale_BJK1 = jnp.swapaxes(bar_BKJ, -1, -2)[..., None] / options.tau
    g_bar = None
    if outputs.a is not None:
        g_bar = outputs.a * (scale_BJK1 if call.per_head else scale_BJK1[..., 0, :])
        g_bar = g_bar.astype(call.g.dtype)
    q_bar = (scale_BJK1 * outputs.o).astype(call.q.dtype)
    return (Call(q=q_bar, k=None, g=g_bar),)


_log_partition.defvjp(_log_partition_forward, _log_partition_backward, symbolic_zeros=True)


# Level 2: attention.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(call: Call, options: Options) -> Outputs:
    return _forward(call, options)


def _keep(call: Call, options: Options):
    outputs = _attend(call, options)  # so that this pass is differentiable too
    outputs = jax.tree.map(lambda x: checkpoint_name(x, OUTPUT), outputs)
    return outputs, (call, outputs)


_attend.defvjp(
    _keep, lambda options, kept, bar: (_attend_backward(kept[0], options, kept[1], bar),)
)


# Level 3: attention's backward pass.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend_backward(call: Call, options: Options, outputs: Outputs, bar: Outputs) -> Call:
    return _backward(call, options, outputs, bar)


def _pull_back_by_blockwise(options: Options, kept, gradients_bar):
    plain = lambda call, outputs, bar: blockwise.backward(call, options, outputs, bar)
    return jax.vjp(plain, *kept)[1](gradients_bar)


_attend_backward.defvjp(
    lambda call, options, outputs, bar: (
        _attend_backward(call, options, outputs, bar),
        (call, outputs, bar),
    ),
    _pull_back_by_blockwise,
)

_DENSE = _Differentiable(_dense_log_partition, dense.attend)
_CHOSEN = _Differentiable(_log_partition, _attend_leading)


# Choice of implementation. Jitted, so that the kernels of equal layers and steps are traced once.


@partial(jax.jit, static_argnums=1)
def _forward(call: Call, options: Options) -> Outputs:
    return _chosen(call, options).forward(call, options)


@partial(jax.jit, static_argnums=1)
def _backward(call: Call, options: Options, outputs: Outputs, bar: Outputs) -> Call:
    return _chosen(call, options).backward(call, options, outputs, bar)


# Imported when used: Pallas takes half a second to import.
def _on_tpu() -> Implementation:
    from cem_jax.kernels.tpu.attention import IMPLEMENTATION

    return IMPLEMENTATION


def _on_gpu() -> Implementation:
    from cem_jax.kernels.gpu.attention import IMPLEMENTATION

    return IMPLEMENTATION


FUSED_PLATFORMS: dict[str, Callable[[], Implementation]] = {"tpu": _on_tpu, "cuda": _on_gpu}


def _chosen(call: Call, options: Options) -> Implementation:
    """Return the implementation on each platform that the program may be compiled for."""
    plain, split = blockwise.IMPLEMENTATION, split_in_use()
    if split.ways("sequence") > 1:
        plain = over_mesh(plain)
        if reason := plain.obstacle(call, options):
            raise Unavailable(reason)
    if options.implementation == "blockwise":
        return plain
    demanded = options.implementation == "pallas"
    target = "tpu" if options.interpret else target_platform()
    able = {}
    for platform, load in FUSED_PLATFORMS.items():
        if platform == "cuda" != target:
            continue  # Triton's lowering needs the GPU it compiles for
        fused = over_mesh(load()) if split else load()
        reason = fused.obstacle(call, options)
        if reason is None:
            able[platform] = fused
        elif platform == target:
            if demanded:
                raise Unavailable(f"'pallas' cannot run: {reason}")
            _say_once(f"attention runs blockwise instead of fused: {reason}")
    if not demanded:
        return Implementation(
            _by_platform(plain.forward, {name: x.forward for name, x in able.items()}),
            _by_platform(plain.backward, {name: x.backward for name, x in able.items()}),
            plain.obstacle,
        )
    if target not in FUSED_PLATFORMS:
        raise Unavailable(
            f"'pallas' needs a TPU or a GPU, and this program is for {target}; "
            "'auto' takes what each platform has"
        )
    return able[target]


def _by_platform(default: Callable, fused: dict[str, Callable]) -> Callable:
    """Return a function of (call, options, …) that picks its platform's when it is lowered."""

    def run(call, options, *rest):
        of_arrays = lambda f: lambda call, *rest: f(call, options, *rest)
        branches = {platform: of_arrays(f) for platform, f in fused.items()}
        return lax.platform_dependent(call, *rest, default=of_arrays(default), **branches)

    return run


def target_platform() -> str:
    """Return cpu, tpu or cuda: from the mesh in use if it names a device, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "cuda" if platform == "gpu" else platform


@cache
def _say_once(message: str) -> None:
    _log.warning(message)
