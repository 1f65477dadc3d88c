"""The training steps of docs/scaling.md, compiled for hardware that is absent, and their table.

    benchmarks/scaling.py [NAME …]     compile names that contain a NAME and have no row yet
    benchmarks/scaling.py --table      print the existing rows as the table of docs/scaling.md

A row is what `cem compile --json` printed, in docs/results/scaling/. Each compilation is a separate
process and takes minutes.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "docs" / "results" / "scaling"


class Step(NamedTuple):
    """A configuration, its devices, and the fields set for them."""

    config: str
    topology: str
    fields: dict[str, Any]

    @property
    def name(self) -> str:
        split = "".join(f"-{axis[5:]}{n}" for axis, n in self.fields.items() if "mesh" in axis)
        return f"{Path(self.config).stem}-{re.sub(r'[:*]', '-', self.topology)}{split}"

    @property
    def command(self) -> list[str]:
        flags = [f"--config.{field}={value}" for field, value in self.fields.items()]
        return [
            "compile",
            "--config",
            f"configs/{self.config}.py",
            "--topology",
            self.topology,
            *flags,
        ]


def _paper(name: str, topology: str, chips: int) -> Step:
    return Step(name, topology, {"train.microbatch": None, "mesh.data": chips})


# Sequences at a time: as many as fit and can be divided over the chips.
STEPS = [
    *(_paper(name, "v5e:4x4", 16) for name in ("cem_86m", "cem_162m", "llama_162m")),
    *(_paper(name, "v5p:4x4x4", 64) for name in ("cem_86m", "cem_162m", "llama_162m")),
    *(
        Step(f"scale/{kind}_{size}", topology, {"train.microbatch": rows})
        for kind in ("cem", "llama")
        for size, topology, rows in (
            ("1b3", "v6e:4x4", 64),
            ("1b3", "v5p:4x4x4", 256),
            ("1b3", "v5e:16x16", 512),
            ("7b", "v6e:4x4", 16),
            ("7b", "v5p:4x4x4", 64),
            ("7b", "v5e:16x16", 256),
        )
    ),
    # four slices: 1,024 chips, data between slices
    Step("scale/cem_7b", "4*v5e:16x16", {"train.microbatch": None, "mesh.data": 4}),
    # 32k positions, split over four chips
    Step(
        "scale/cem_7b",
        "v5p:4x4x4",
        {
            "train.microbatch": 16,
            "train.global_batch": 128,
            "data.context": 32768,
            "mesh.context": 4,
        },
    ),
]


def compile_row(step: Step) -> None:
    """Run `cem compile` and keep its output."""
    command = [sys.executable, "-m", "cem_jax", *step.command, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        print(f"{step.name}: exit status {done.returncode}", file=sys.stderr)
        return
    ROWS.mkdir(parents=True, exist_ok=True)
    found = json.loads(done.stdout) | {"command": "cem " + " ".join(step.command)}
    path = ROWS / f"{step.name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    partial.rename(path)


def table() -> str:
    """Return the rows as Markdown."""
    head = (
        "configuration", "devices", "mesh", "tokens per step", "state", "temporaries", "total, GiB",
        "of capacity", "GB sent", "overlapped", "step, s", "MFU", "tokens/s per chip",
    )  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for step in STEPS:
        path = ROWS / f"{step.name}.json"
        if path.exists():
            lines.append(_cells(step, json.loads(path.read_text())))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(step: Step, found: dict[str, Any]) -> list[str]:
    memory, gib = found["memory"], lambda size: "" if size is None else f"{size / 2**30:.2f}"
    state = memory["parameters"] + memory["optimizer"]
    tokens = round(found["flops"]["model"] / found["flops"]["per_token"])
    mesh = " × ".join(f"{axis} {n}" for axis, n in found["mesh"].items() if n > 1)
    share = f"{memory['total'] / memory['capacity']:.0%}" + ("" if found["fits"] else ", NO")
    cells = [Path(step.config).stem, found["topology"], mesh, f"{tokens:,}"]
    cells += [gib(state), gib(memory["temporaries"]), gib(memory["total"]), share]
    if found["step_seconds"] is None:
        return cells + [""] * 5
    kinds = found["collectives"].values()
    sent = sum(kind["sent"] for kind in kinds)
    hidden = sum(kind["overlapped"] for kind in kinds)
    rate = tokens / found["step_seconds"] / found["devices"]
    cells += [f"{sent / 1e9:.2f}", f"{hidden / max(sent, 1):.0%}", f"{found['step_seconds']:.3f}"]
    return [*cells, f"{found['mfu']:.0%}", f"{rate:,.0f}"]


def main(arguments: list[str]) -> None:
    if arguments == ["--table"]:
        print(table())
        return
    for step in STEPS:
        wanted = not arguments or any(part in step.name for part in arguments)
        if wanted and not (ROWS / f"{step.name}.json").exists():
            compile_row(step)


if __name__ == "__main__":
    main(sys.argv[1:])
