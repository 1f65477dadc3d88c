"""Cases for the fused kernels in interpret mode, and the references they are compared with.

Shapes: B batch · J positions · K heads · R head dim · D model dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
from attention_oracle import call_of, compiled_quickly, random_inputs
from jax.experimental.pallas import tpu as pltpu

from cem_jax.kernels import dense
from cem_jax.kernels.call import Call, Implementation, Options, Outputs, Scores

TAU = 6.0
# The interpreter runs one program at a time, so tests use small tiles where possible
SMALL = (32, 16)


def draw(positions, *, dtype=jnp.float32, batch=1, width=28, dim=40, **what) -> Call:
    """Draw inputs as `random_inputs` does, with a batch axis."""
    drawn = random_inputs(
        np.random.default_rng(positions), positions, leading=(batch,), width=width, dim=dim, **what
    )
    wide = {n: jnp.asarray(x, None if n == "segments" else jnp.float32) for n, x in drawn.items()}
    low = {n: x.astype(dtype) if n in "qkvgh" else x for n, x in wide.items()}
    return call_of(**low)


def cotangents(call: Call, average: str) -> Outputs:
    """Draw gradients of the outputs."""
    rng = np.random.default_rng(1)
    normal = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    batch, positions, heads, _ = call.q.shape
    a = None if average == "none" else normal((batch, positions, call.h.shape[-1]))
    return Outputs(normal((batch, heads, positions)), normal(call.q.shape), a)


def fused(kernels: Implementation, options: Options):
    """Return the function (call, cotangents) → (outputs, gradients) of the kernels."""

    def both(call, bar):
        outputs = kernels.forward(call, options)
        return outputs, kernels.backward(call, options, outputs, bar)

    return both


def plain(options: Options):
    """Return the same function by automatic differentiation of `dense`."""

    def both(call, bar):
        segments = call.scores.segments
        attend = lambda t: dense.attend(
            t._replace(scores=t.scores._replace(segments=segments)), options
        )
        outputs, pull_back = jax.vjp(attend, call.floating)
        return outputs, pull_back(bar)[0]

    return both


def score_gradient_sizes(call: Call, options: Options, bar: Outputs):
    """Return Σ|dS| and Σ(i − j)|dS| per head, which bound the gradients of β and m. [K] each."""
    s_BKIJ = dense.scores(call, options)

    def from_scores(s):
        lse = jax.nn.logsumexp(s, axis=-1)
        p = jnp.exp(s - lse[..., None])
        values = call.k if call.v is None else call.v
        a = None if options.average == "none" else jnp.einsum("bkij,bjd->bid", p, call.h)
        return Outputs(lse, jnp.einsum("bkij,bjkr->bikr", p, values), a)

    visible = jnp.isfinite(s_BKIJ)
    (ds,) = jax.vjp(from_scores, s_BKIJ)[1](bar)
    size = jnp.where(visible, jnp.abs(ds), 0.0)
    i = jnp.arange(size.shape[-1])
    distance = jnp.abs(i[:, None] - i[None, :])[None, None]
    return size.sum((0, 2, 3)), (size * distance).sum((0, 2, 3))


def relative(found, expected) -> float:
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


def interpreted(average="none", blocks=SMALL, interpret=True) -> Options:
    """Return options that run the kernels in Pallas' interpreter."""
    return Options(TAU, average, "pallas", blocks, interpret)


def run(kernels: Implementation, call: Call, average="none", blocks=SMALL, interpret=True):
    """Return (outputs, gradients) of the kernels."""
    options = interpreted(average, blocks, interpret)
    assert kernels.obstacle(call, options) is None
    bar = cotangents(call, average)
    return compiled_quickly(fused(kernels, options), call, bar)(call, bar)


def run_watched(capfd, caplog, kernels: Implementation, call: Call, average, blocks):
    """Run as `run` does on a TPU's interpreter: unwritten memory is NaN and no copy may race."""
    params = pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        dma_execution_mode="eager",  # time a copy by its start, not by the wait for it
        vector_clock_size=64,  # with the few of the default, unordered copies seem to be ordered
    )
    found = jax.block_until_ready(run(kernels, call, average, blocks, params))
    # printed by older versions of JAX, logged by newer ones
    assert "RACE" not in capfd.readouterr().out + caplog.text
    return found


def check(kernels: Implementation, call: Call, average="none", blocks=SMALL) -> None:
    """Check that the kernels' outputs and gradients are those of `dense`."""
    tolerance = 1e-5
    outputs, gradients = run(kernels, call, average, blocks)
    options, bar = Options(TAU, average), cotangents(call, average)
    expected, expected_gradients = compiled_quickly(plain(options), call, bar)(call, bar)
    for name, x, y in zip(("lse", "o", "a"), outputs, expected, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.shape == y.shape and relative(x, y) <= tolerance), name
    assert jax.tree.structure(gradients) == jax.tree.structure(expected_gradients)
    for name in ("q", "k", "v", "g", "h"):
        x, y = getattr(gradients, name), getattr(expected_gradients, name)
        assert x is None or (x.dtype == y.dtype and relative(x, y) <= tolerance), name
    sizes = jax.jit(lambda t, bar: score_gradient_sizes(t, options, bar))(call, bar)
    for name, size in zip(("self_bias", "slopes"), sizes, strict=True):
        x, y = getattr(gradients.scores, name), getattr(expected_gradients.scores, name)
        if x is not None:
            assert (np.abs(x - y) <= tolerance * np.asarray(size)).all(), name


def on_device(kind: str):
    """Pretend to compile for a TPU of this kind."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def shapes(positions, *, heads, width, dtype=jnp.bfloat16, batch=2, diagonal="shared") -> Call:
    """Return the shapes of a call with biases and documents."""
    of = lambda *shape, t=dtype: jax.ShapeDtypeStruct((batch, positions, *shape), t)
    dim = heads * width
    g = {"none": None, "shared": of(dim), "per_head": of(heads, dim)}[diagonal]
    scalars = jax.ShapeDtypeStruct((heads,), jnp.float32)
    h = None if g is None else of(dim)
    each = of(heads, width)
    return Call(q=each, k=each, g=g, h=h, scores=Scores(scalars, scalars, of(t=jnp.int32)))
