import numpy as np
import pytest

from cem_jax.data.dataset.order import hashed, permuted


def permutation(size, *key):
    index = np.arange(size)
    return permuted(index, size, hashed(*key, np.zeros(size, np.int64)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4097])
def test_is_a_permutation_for_every_size(size):
    for key in range(20):
        assert np.array_equal(np.sort(permutation(size, key)), np.arange(size))


def test_keys_give_different_orders():
    orders = {tuple(permutation(100, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_indices_are_independent_of_each_other():
    whole = permutation(1000, 3)
    some = np.array([999, 0, 500, 500])
    assert np.array_equal(permuted(some, 1000, hashed(3, np.zeros(4, np.int64))), whole[some])


def test_orders_are_evenly_spread():
    """Over many keys, each index and each pair of neighbours is everywhere equally often."""
    size, keys = 10, 20_000
    index = np.tile(np.arange(size), keys)
    key = hashed(np.repeat(np.arange(keys), size))
    landed = permuted(index, size, key).reshape(keys, size)
    for column in range(size):
        counts = np.bincount(landed[:, column], minlength=size)
        assert np.abs(counts - keys / size).max() < 5 * np.sqrt(keys / size)
    pairs = np.bincount(landed[:, 3] * size + landed[:, 4], minlength=size * size)
    expected = keys / (size * (size - 1))
    off_diagonal = pairs.reshape(size, size)[~np.eye(size, dtype=bool)]
    assert np.abs(off_diagonal - expected).max() < 6 * np.sqrt(expected)


def test_neighbours_are_not_correlated():
    order = permutation(50_000, 1).astype(np.float64)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(50_000), order)[0, 1]) < 0.02
