import os
import signal
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell starts its background jobs without SIGINT; whatever tests start would be without it too
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shared_data() -> Path:
    """The folder of real corpora and tokenizers, named by CEM_TEST_DATA."""
    folder = os.environ.get("CEM_TEST_DATA")
    if not folder:
        pytest.skip("CEM_TEST_DATA is not set: no real corpora to test with")
    return Path(folder)


@pytest.fixture
def x64():
    """float64 on for one test."""
    with jax.enable_x64(True):
        yield
