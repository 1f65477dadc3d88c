"""Where compiled functions are kept, and what happens if they cannot be."""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_config

from cem_jax.runs import setup
from cem_jax.runs.setup import compile_cache, configure_jax


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_compile_cache_is_the_fields_then_jaxs_then_xdgs_then_the_homes(monkeypatch):
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    default = tiny_config(log__compile_cache=None)
    assert compile_cache(default) == "/home/one/.cache/cem_jax/compile"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compile_cache(default) == "/home/one/.cache/cem_jax/compile"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert compile_cache(default) == "/xdg/cem_jax/compile"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/jax")
    assert compile_cache(default) == "/jax"
    assert compile_cache(tiny_config(log__compile_cache="~/field")) == "/home/one/field"


def test_a_full_compile_cache_is_one_warning(tmp_path, capsys):
    configure_jax(tiny_config(log__compile_cache=str(tmp_path / "full")))
    configure_jax(tiny_config(log__compile_cache=str(tmp_path / "full")))
    for name in ("one", "two"):
        text = f"Error writing persistent compilation cache entry for 'jit_{name}': OSError: full"
        with warnings.catch_warnings():  # pytest's own collector aside
            warnings.showwarning = setup.warnings.showwarning
            warnings.simplefilter("always")
            warnings.warn(text, stacklevel=1)
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and "full: cannot be used: OSError: full" in told


def test_without_a_home_there_is_no_compile_cache_and_one_warning(monkeypatch, capsys):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    configure_jax(tiny_config(log__compile_cache=None))
    assert capsys.readouterr().err.count("warning: no home directory") == 1
    assert jax.config.jax_compilation_cache_dir is None
    assert int(jax.jit(lambda x: x + 1)(jnp.zeros((), jnp.int32))) == 1
