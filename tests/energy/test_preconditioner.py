import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.energy import (
    Preconditioner,
    extreme_eigenvalues,
    precondition,
    preconditioner_matrix,
)

FORMS = ["diagonal", "symmetric", "psd"]


def factors(rng, form, dim=5, rank=2, leading=()):
    draw = lambda *shape: rng.normal(size=(*leading, *shape))
    left = None if form == "diagonal" else draw(dim, rank)
    return Preconditioner(draw(dim), left, draw(dim, rank) if form == "symmetric" else None)


def explicit(diagonal, left=None, right=None):
    matrix = np.diag(np.log1p(np.exp(diagonal)))
    for d in range(0 if left is None else left.shape[1]):
        if right is None:
            matrix += np.outer(left[:, d], left[:, d])
        else:
            matrix += np.outer(left[:, d], right[:, d]) + np.outer(right[:, d], left[:, d])
    return matrix


@pytest.mark.parametrize("form", FORMS)
def test_matrix_is_equation_13(x64, form):
    p = factors(np.random.default_rng(0), form)
    matrix = preconditioner_matrix(*p)
    np.testing.assert_allclose(matrix, explicit(*p), rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(matrix, matrix.T)
    if form != "symmetric":
        assert np.linalg.eigvalsh(matrix)[0] >= np.log1p(np.exp(p.diagonal)).min() - 1e-12


def test_symmetric_form_need_not_be_positive_definite(x64):
    left = np.array([[3.0], [0.0]])
    assert np.linalg.eigvalsh(preconditioner_matrix([0.0, 0.0], left, -left))[0] < 0


def test_initial_value(x64):
    """Initially p = 1/√D and right = 0, so P = softplus(1) I."""
    dim = 16
    left = np.random.default_rng(0).normal(size=(dim, 4))
    matrix = preconditioner_matrix(np.full(dim, dim**-0.5) * dim**0.5, left, np.zeros((dim, 4)))
    np.testing.assert_allclose(matrix, 1.3132616875 * np.eye(dim), rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_folded_equals_explicit(x64, form):
    rng = np.random.default_rng(1)
    shared, per_head = factors(rng, form), factors(rng, form, leading=(3,))
    vectors, weight = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(3, 4, 5))
    np.testing.assert_allclose(precondition(vectors, shared), vectors @ explicit(*shared))
    matrices = preconditioner_matrix(*per_head)
    assert matrices.shape == (3, 5, 5)
    for k in range(3):
        mine = Preconditioner(*(None if f is None else f[k] for f in per_head))
        np.testing.assert_allclose(matrices[k], explicit(*mine), rtol=1e-12)
        np.testing.assert_allclose(
            precondition(weight, per_head)[k], weight[k] @ explicit(*mine), rtol=1e-11
        )
    assert precondition(weight, None) is weight
    low = precondition(jnp.asarray(weight, jnp.bfloat16), per_head)
    assert low.dtype == jnp.bfloat16


def test_gradients_of_the_factors_equal_those_through_the_matrix(x64):
    rng = np.random.default_rng(2)
    p, weight = factors(rng, "symmetric"), rng.normal(size=(4, 5))
    bar = rng.normal(size=weight.shape)
    folded = jax.grad(lambda p: (bar * precondition(weight, p)).sum())(p)
    written = jax.grad(lambda p: (bar * (weight @ preconditioner_matrix(*p))).sum())(p)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), folded, written)


@pytest.mark.parametrize("left", [(4, 2), (1, 2), (5,)])
def test_shapes_that_do_not_fit_are_named(left):
    with pytest.raises(ValueError, match="left and right"):
        preconditioner_matrix(np.zeros(5), np.zeros(left))
    with pytest.raises(ValueError, match="left and right"):
        preconditioner_matrix(np.zeros(5), np.zeros((5, 2)), np.zeros((5, 1)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.0, 0.02, 1.0])
def test_extreme_eigenvalues(form, scale):
    p = factors(np.random.default_rng(1), form, dim=24, rank=4, leading=(3,))
    small = lambda f: None if f is None else (scale * f).astype(np.float32)
    p = Preconditioner(p.diagonal.astype(np.float32), small(p.left), small(p.right))
    expected = np.linalg.eigvalsh(np.asarray(preconditioner_matrix(*p), np.float64))
    smallest, largest = jax.jit(extreme_eigenvalues)(p)
    tolerance = 2e-6 * np.abs(expected).max()  # relative to ‖P‖, in float32
    np.testing.assert_allclose(smallest, expected[:, 0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(largest, expected[:, -1], rtol=0, atol=tolerance)
