"""Rows of the table, and the tolerances that rounding justifies.

A result is compared with a float64 reference from `plain`. How much rounding can change a quantity
depends on its conditioning, so that is measured: the reference is computed again from inputs and
parameters that each differ by half an eps of the tested dtype, with random signs. The resulting
change is `noise`, and

    tolerance = SAFETY × max(noise, eps).

Both are relative to the largest entry of the array, or to a tenth of the largest entry in the tree
that the array belongs to, so that rounding is not compared with a gradient that is exactly zero.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Every operation rounds, not only the inputs: there is a chain of some twenty roundings, and in
# float32 and float64 sums of up to thousands of terms, whose errors mostly cancel. With bfloat16
# inputs the sums are float32. A mistake (a factor, a sign, a missing term) causes an error of 1e-2
# to 1 with the random values used here.
SAFETY = {"float64": 32.0, "float32": 32.0, "bfloat16": 8.0}

# `noise` is the worst of this many random draws.
_DRAWS = 2

# Arrays count as at least this fraction of the largest entry in their tree.
_SHARE = 0.1

# The noise of float64 is no larger than the reference's own rounding, so it is measured with larger
# steps and scaled down.
_FLOAT64_STEP = 1e-9


@dataclass(frozen=True)
class Row:
    """One check: what was compared, its shape and dtype, and the result."""

    check: str
    shape: str
    dtype: str
    error: float  # the largest, relative
    tolerance: float
    detail: str = field(default="", compare=False)  # where the worst error is

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.tolerance)  # False for NaN

    def to_json(self) -> dict[str, Any]:
        """Return the keys that `cem verify --json` promises."""
        return dict(
            check=self.check,
            shape=self.shape,
            dtype=self.dtype,
            error=self.error,
            tolerance=self.tolerance,
            passed=self.passed,
        )


class Reference(NamedTuple):
    """A float64 result and its absolute noise in each dtype: trees of the same structure."""

    value: Any
    noise: dict[str, Any]

    def part(self, name: Any) -> "Reference":
        """Return the reference for entry `name` of the trees."""
        return self.map(lambda tree: tree[name])

    def map(self, function: Callable) -> "Reference":
        return Reference(
            function(self.value), {dtype: function(noise) for dtype, noise in self.noise.items()}
        )


def eps(dtype: str) -> float:
    """Return the distance from 1 to the next larger number of a dtype."""
    return float(jnp.finfo(dtype).eps)


def in_dtype(tree: Any, dtype: str) -> Any:
    """Convert NumPy arrays to JAX arrays of `dtype`; integers and None stay as they are."""
    cast = lambda x: jnp.asarray(x, dtype) if np.issubdtype(x.dtype, np.floating) else x
    return jax.tree.map(cast, tree)


def parameters_in(tree: Any, dtype: str) -> Any:
    """Convert parameters to the dtype that computation in `dtype` uses: float32 unless float64."""
    return in_dtype(tree, "float64" if dtype == "float64" else "float32")


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Set up JAX to compute in `dtype`: float64 on the CPU, everything else with float64 off.

    Products use the full precision of their dtype, which accelerators may lower by default.
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
    """Jit a function that runs only a few times: on CPU, without the compiler's optimisations."""
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=quick, **settings)


def to_numpy(tree: Any) -> Any:
    """Convert every leaf to NumPy float64."""
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def reference(function: Callable, *inputs: Any, dtypes: tuple[str, ...]) -> Reference:
    """Return `function` of the inputs in float64, and how much rounding the inputs changes it."""
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
    """Return max|actual − expected| / max|expected|; infinite for NaN and differing shapes."""
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
    """Compare `actual` with the reference leaf by leaf; the row describes the worst leaf.

    `slack` is added to the tolerance: the method's own error, beyond rounding.
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
