"""A row of the table, and how far apart two results may be.

A result is compared with a float64 reference made by `plain`. How much of a difference rounding
explains depends on how well conditioned the quantity is, so that is measured: the reference is made
again from inputs and parameters that are off by half an eps of the tested dtype, each its own
random way. What this moves it by is `noise`, and

    tolerance = SAFETY × max(noise, eps).

Both are relative to the largest entry of the array, or to a tenth of the largest in the tree that
the array belongs to, lest rounding be judged beside a gradient that is truly zero.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Rounding happens at every operation, not only once at the inputs: a chain of some twenty
# roundings, and in float32 and float64 within sums of up to thousands of terms, whose errors mostly
# cancel. With bfloat16 inputs the sums are float32. A mistake (a factor, a sign, a missing term) is
# an error of 1e-2 to 1 on the random values used here.
SAFETY = {"float64": 32.0, "float32": 32.0, "bfloat16": 8.0}

# Random roundings that `noise` is the worst of.
_DRAWS = 2

# Of the largest entry in a tree, what smaller arrays are judged beside.
_SHARE = 0.1

# float64's own noise drowns in the reference's rounding; it is measured with larger steps and
# scaled down.
_FLOAT64_STEP = 1e-9


@dataclass(frozen=True)
class Row:
    """One check: what was compared, at which shape and dtype, and how it came out."""

    check: str
    shape: str
    dtype: str
    error: float  # the worst, relative
    tolerance: float
    detail: str = field(default="", compare=False)  # where the worst error is

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.tolerance)  # False for NaN

    def to_json(self) -> dict[str, Any]:
        """The keys that `cem verify --json` promises."""
        return dict(
            check=self.check,
            shape=self.shape,
            dtype=self.dtype,
            error=self.error,
            tolerance=self.tolerance,
            passed=self.passed,
        )


class Reference(NamedTuple):
    """A float64 result and its noise in each dtype, absolute: trees of the same form."""

    value: Any
    noise: dict[str, Any]

    def part(self, name: Any) -> "Reference":
        """What stands at `name` in every tree."""
        return self.map(lambda tree: tree[name])

    def map(self, function: Callable) -> "Reference":
        return Reference(
            function(self.value), {dtype: function(noise) for dtype, noise in self.noise.items()}
        )


def eps(dtype: str) -> float:
    """The distance from 1 to the next number."""
    return float(jnp.finfo(dtype).eps)


def in_dtype(tree: Any, dtype: str) -> Any:
    """NumPy arrays as JAX arrays of `dtype`; integers and None as they are."""
    cast = lambda x: jnp.asarray(x, dtype) if np.issubdtype(x.dtype, np.floating) else x
    return jax.tree.map(cast, tree)


def parameters_in(tree: Any, dtype: str) -> Any:
    """Parameters as a computation in `dtype` holds them: float32, or float64 for float64."""
    return in_dtype(tree, "float64" if dtype == "float64" else "float32")


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Where results of `dtype` are computed: float64 on the CPU, all others with float64 off.

    Products are asked for at their dtype's full precision, which accelerators may lower.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(dtype == "float64"))
        stack.enter_context(jax.default_matmul_precision("highest"))
        if dtype == "float64":
            stack.enter_context(_on_cpu())
        yield


def _on_cpu() -> contextlib.AbstractContextManager:
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return contextlib.nullcontext()


def jit(function: Callable, **settings: Any) -> Callable:
    """`jax.jit` for what runs a few times only: on the CPU without the compiler's optimisations."""
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=quick, **settings)


def to_numpy(tree: Any) -> Any:
    """Every leaf in NumPy's float64."""
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def reference(function: Callable, *inputs: Any, dtypes: tuple[str, ...]) -> Reference:
    """`function` of the inputs in float64, and what rounding the inputs does to it."""
    rng = np.random.default_rng(0)

    def evaluate(step: float):
        def perturb(x):
            if not np.issubdtype(x.dtype, np.floating):
                return x
            signs = rng.integers(0, 2, x.shape) * 2.0 - 1.0
            return jnp.asarray(x * (1.0 + step * signs), "float64")

        return to_numpy(function(*jax.tree.map(perturb, inputs)))

    with precision("float64"):
        value = evaluate(0.0)
        noise = {}
        for dtype in dtypes:
            step = _FLOAT64_STEP if dtype == "float64" else eps(dtype) / 2
            moved = [jax.tree.map(_distance, evaluate(step), value) for _ in range(_DRAWS)]
            scale = eps(dtype) / 2 / step
            noise[dtype] = jax.tree.map(lambda *n, s=scale: s * max(n), *moved)
    return Reference(value, noise)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """max|actual − expected| / max|expected|; NaN and shapes that differ count as infinite."""
    return _distance(np.asarray(actual), np.asarray(expected)) / (_size(np.asarray(expected)) or 1)


def _distance(actual: np.ndarray, expected: np.ndarray) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    return float(np.nan_to_num(_size(actual - expected), nan=np.inf))


def _size(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def compare(
    check: str, shape: str, dtype: str, actual: Any, wanted: Reference, *, slack: float = 0.0
) -> Row:
    """`actual` against the reference, leaf by leaf; the row tells the leaf that does worst.

    `slack` is added to the tolerance: an error that the method has besides rounding.
    """
    expected = jax.tree.leaves_with_path(wanted.value)
    found, noises = jax.tree.leaves(to_numpy(actual)), jax.tree.leaves(wanted.noise[dtype])
    floor = _SHARE * max(_size(leaf) for _, leaf in expected)
    leaves = []
    for (path, leaf), value, noise in zip(expected, found, noises, strict=True):
        scale = max(_size(leaf), floor) or 1.0
        error = _distance(value, leaf) / scale
        tolerance = SAFETY[dtype] * max(noise / scale, eps(dtype)) + slack
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        leaves.append((error, tolerance, where))
    return Row(check, shape, dtype, *max(leaves, key=lambda leaf: leaf[0] / leaf[1]))
