"""Each function is compiled once: in the first run of a process, a resumed run and a copy."""

import subprocess
import sys

import tiny
from process_group import environment, flags

SCRIPT = """
import collections, logging, sys
import jax
from cem_jax import cli

compiled = collections.Counter()

class Counting(logging.Handler):
    def emit(self, record):
        words = record.getMessage().split()
        if words[0] == "Compiling":
            compiled[words[1]] += 1

logger = logging.getLogger("jax._src.interpreters.pxla")
logger.addHandler(Counting())
logger.propagate = False
jax.config.update("jax_log_compiles", True)
for run in {runs!r}:
    compiled.clear()
    assert cli.main(["train", *run]) == 0
    found = {{name: compiled[f"jit({{name}})"] for name in ("step", "sums", "probe")}}
    assert found == dict.fromkeys(found, 1), found
"""


def test_nothing_is_compiled_twice(tmp_path):
    """Runs in its own process, since earlier imports matter."""
    dataset = tiny.tiny_dataset(tmp_path / "data")
    common = dict(log__energies_every=2, eval__every=2, checkpoint__every=2, mesh__fsdp=2)
    common |= dict(mesh__data=1, model__layers=1)
    first, copy = tmp_path / "first", tmp_path / "copy"
    runs = [
        flags(first, dataset, train__steps=2, **common),
        flags(first, dataset, train__steps=4, **common),
        [*flags(copy, dataset, train__steps=2, **common), "--init-from", str(first)],
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(runs=runs)],
        env=environment(JAX_NUM_CPU_DEVICES="2"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
