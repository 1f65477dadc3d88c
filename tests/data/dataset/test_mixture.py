import numpy as np
import pytest

from cem_jax.data.dataset.mixture import open_mixture
from cem_jax.data.dataset.order import choose
from cem_jax.errors import UserError


@pytest.mark.parametrize("shares", [(1,), (1, 1), (7, 3), (1, 2, 3, 4), (999_999, 1), (5, 1, 1)])
def test_shares_are_exact_and_gapless(shares):
    numbers = np.arange(5000)
    source, within = choose(shares, numbers)
    total = sum(shares)
    for s, share in enumerate(shares):
        own = source == s
        assert np.array_equal(within[own], np.arange(own.sum()))
        met = np.cumsum(own)
        assert np.abs(met - (numbers + 1) * share / total).max() < len(shares)
    again = choose(shares, numbers[::-7])
    assert np.array_equal(again[0], source[::-7])
    assert np.array_equal(again[1], within[::-7])


def test_large_numbers_do_not_overflow():
    source, within = choose((999_999, 1), np.array([10**12]))
    assert source[0] == 1
    assert within[0] == 10**6


def test_opens_entries(make_dataset, texts):
    a, b = make_dataset(texts), make_dataset(texts[::-1])
    mixture = open_mixture((f"{a.path}=0.75", f"{b.path}=.25"))
    assert mixture.shares == (3, 1)
    assert mixture.tokenizer_hash == a.tokenizer_hash
    assert mixture.load_tokenizer().vocab_size == mixture.vocab_size == 512
    assert mixture.fingerprint != open_mixture((f"{a.path}=1", f"{b.path}=1")).fingerprint
    assert open_mixture((f"{a.path}=2",)).fingerprint == a.fingerprint


def test_reports_all_faults_at_once(make_dataset, texts):
    a, b = make_dataset(texts), make_dataset(texts, separator="eos")
    entries = (f"{a.path}=1", f"{b.path}=1", str(a.path), f"{a.path}=0", f"{a.path}=nan", "no=1")
    with pytest.raises(UserError) as caught:
        open_mixture(entries)
    told = caught.value.messages
    assert len(told) == 5
    assert sum("is not directory=weight" in message for message in told) == 3
    assert any("separator 'bos'" in message and "'eos'" in message for message in told)
    with pytest.raises(UserError, match="empty"):
        open_mixture(())
