"""One process of a soak: `cem train` that logs the rows consumed by each step.

    soak_worker.py LOG FLAGS-OF-CEM-TRAIN…

A line of LOG has the step, and number and digest of each row this process gave to its devices.
"""

import json
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> int:
    from cem_jax import cli
    from cem_jax.distributed.session import local_rows
    from cem_jax.runs import loop
    from cem_jax.sharding.mesh import batch_sharding

    log = open(sys.argv[1], "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - until the end
    trained, placed = loop.Loop.run, loop.place_batch
    step = iter(())

    def run(self, state, position, after_step):
        nonlocal step
        step = iter(range(position.step, self.course.total))
        return trained(self, state, position, after_step)

    def place(batch, mesh):
        count = len(batch["tokens"])
        rows = local_rows(batch_sharding(mesh), _global_rows(batch, mesh))
        numbers = range(count) if rows is None else rows.tolist()
        digests = [zlib.crc32(row.tobytes()) for row in batch["tokens"]]
        line = {"step": next(step), "rows": dict(zip(map(str, numbers), digests, strict=True))}
        log.write(json.dumps(line) + "\n")
        return placed(batch, mesh)

    loop.Loop.run, loop.place_batch = run, place
    return cli.main(["train", *sys.argv[2:]])


def _global_rows(batch, mesh) -> int:
    """Return the number of rows in the whole batch; this process has those of its devices."""
    import jax

    from cem_jax.distributed.session import local_rows
    from cem_jax.sharding.mesh import batch_sharding

    ways = jax.device_count()
    share = local_rows(batch_sharding(mesh), ways)
    return len(batch["tokens"]) * ways // (ways if share is None else len(share))


if __name__ == "__main__":
    sys.exit(main())
