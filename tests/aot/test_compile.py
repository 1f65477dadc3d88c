"""`cem compile`: the real command, for fake CPU devices and absent TPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import BASE, FIELDS, tiny_config

from cem_jax import cli
from cem_jax.aot import step, suggest
from cem_jax.aot.collectives import Collective
from cem_jax.aot.report import rendered, rendered_choice
from cem_jax.aot.roofline import estimate, flops, link_of, recomputed_flops
from cem_jax.aot.step import Compiled, bytes_needed
from cem_jax.aot.suggest import Tried, meshes, microbatches, overrides_of, policies, suggestions
from cem_jax.aot.topology import GIB, Capacity, Topology
from cem_jax.errors import RunFailed, UserError
from cem_jax.train.flops import training_flops_per_token

CHIP = SimpleNamespace(device_kind="TPU v5 lite")
QUICK = FIELDS | {"model.attention.steps": 1, "model.mlp.steps": 1, "train.global_batch": 16}


def topology(count=4, **capacity):
    known = dict(memory=16 * GIB, bandwidth=800e9, link=100e9) | capacity
    return Topology(f"v5e:{count}x1", "tpu", [CHIP] * count, Capacity(**known))


def compiled(
    total=GIB, fits=True, moved=8e9, found=(), shape=(4, 1, 1, 1), chips=(CHIP,) * 4, **fields
):
    memory = dict(parameters=1, optimizer=2, arguments=3, temporaries=4, outputs=0, code=0)
    memory |= dict(total=total, capacity=16 * GIB)
    shape = dict(zip(("data", "fsdp", "tensor", "context"), shape, strict=True))
    mesh = SimpleNamespace(shape=shape, devices=np.array(chips, dtype=object))
    values = dict(
        mesh=mesh, seconds=2.0, memory=memory, fits=fits, bytes=moved, collectives=list(found),
        unread_loops=0, xla={},
    )  # fmt: skip
    return Compiled(**values | fields)


def message(sent, *, overlapped=False, groups=((0, 1, 2, 3),), times=1):
    return Collective("all-gather", "fsdp", groups, times, True, int(sent), sent, overlapped)


def command(*flags, environment=None, fields=QUICK):
    """Return exit status, standard output and error of the command in its own process."""
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    done = subprocess.run(
        [sys.executable, "-m", "cem_jax", "compile", "--config", BASE, *given, *flags],
        capture_output=True, text=True, env=os.environ | (environment or {}),
        cwd=Path(BASE).parents[1],
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_eight_cpu_devices():
    code, out, err = command("--topology", "cpu:8", "--config.mesh.fsdp=4", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["fits"] is True
    assert found["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1, "context": 1}
    memory = found["memory"]
    parts = ("arguments", "temporaries", "outputs", "code")
    assert memory["total"] == sum(memory[part] for part in parts) < memory["capacity"]
    # moments of Adam, and the optimizer's counters
    assert 2 * memory["parameters"] <= memory["optimizer"] < 2 * memory["parameters"] + 100
    assert memory["parameters"] + memory["optimizer"] <= memory["arguments"]
    per_token = training_flops_per_token(tiny_config(**{**STEPS, "mesh__fsdp": 4}).model, 32)
    assert found["flops"]["model"] == per_token * 16 * 32
    assert {"all-gather", "all-reduce"} <= set(found["collectives"])
    assert all(row["count"] > 0 and row["bytes"] > 0 for row in found["collectives"].values())
    assert "fsdp" in found["collectives_by_axes"]
    assert found["loops_not_read"] == 0
    assert found["bytes"] > memory["arguments"]
    assert found["step_seconds"] > 0 and 0 < found["mfu"] < 1
    assert "compiling for cpu:8: mesh data -1, fsdp 4; 16 sequences of 32" in err


@pytest.mark.parametrize("mesh", ["fsdp=4 tensor=2", "fsdp=2 tensor=2 context=2"])
def test_no_array_is_copied_to_all_devices_to_be_split_otherwise(mesh):
    """XLA's last resort, which it reports on stderr for each array."""
    code, _, err = command("--topology", "cpu:8", *(f"--config.mesh.{m}" for m in mesh.split()))
    assert code == 0, err
    assert "rematerialization" not in err


STEPS = {"model__attention__steps": 1, "model__mlp__steps": 1}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--topology", "v5e:four"),
            ["--topology v5e:four", "expected v5e:AxB", "such as v5e:4x4"],
        ),
        (("--topology", "v9:4x4"), ["--topology v9:4x4", "known: ", "v5p:AxBxC", "cpu:N"]),
        (("--topology", "cpu:8", "--config.model.dim=33"), ["model.attention.heads"]),
        (("--suggest",), ["required: --topology"]),
    ],
)
def test_refusals(flags, words, capsys):
    assert cli.main(["compile", "--config", BASE, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cem: error: ")
    assert all(word in line for word in words)


def test_a_batch_that_does_not_divide():
    code, out, err = command("--topology", "cpu:8", "--config.train.global_batch=12")
    assert (code, out) == (2, "")
    assert "cem: error: train.global_batch: 12 is not a multiple of mesh.data 8" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (24.50G) exceeds available HBM (15.75G). HLO "
            "module: jit_step.",
            24.5 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 512.25M of 15.75G hbm. Exceeded hbm capacity by 1G.",
            512.25 * 2**20,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M vmem.", None),
        ("INTERNAL: Mosaic failed to compile TPU kernel", None),
    ],
)
def test_the_size_in_the_compilers_message(text, size):
    assert bytes_needed(text) == size


def raising(error):
    def compile_(*_):
        raise jax.errors.JaxRuntimeError(error)

    return compile_


def one_cpu():
    return Topology("cpu:1", "cpu", jax.devices("cpu")[:1], Capacity(16 * GIB, 1e9, 1e9))


def test_a_compiler_out_of_memory_is_a_result(monkeypatch):
    text = "the total memory required for HLO temporaries (24.00G) exceeds available HBM (15.75G)."
    monkeypatch.setattr(step, "_compile", raising(text))
    found = step.compile_step(tiny_config(), one_cpu())
    assert (found.fits, found.bytes, found.collectives) == (False, None, None)
    assert (found.memory["total"], found.memory["temporaries"]) == (24 * GIB, None)
    assert found.memory["parameters"] > 0
    assert estimate(tiny_config(), topology(), found)["step_seconds"] is None


def test_other_compiler_errors_end_the_command(monkeypatch):
    monkeypatch.setattr(step, "_compile", raising("INTERNAL: Mosaic failed"))
    with pytest.raises(RunFailed, match="the compiler for cpu:1 gave up: INTERNAL: Mosaic failed"):
        step.compile_step(tiny_config(), one_cpu())


def test_too_large_for_its_device(monkeypatch):
    done = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((1000,), "float32")).compile()
    monkeypatch.setattr(step, "_compile", lambda *_: done)
    small = one_cpu()._replace(capacity=Capacity(1000, 1e9, 1e9))
    found = step.compile_step(tiny_config(), small)
    assert not found.fits
    assert found.memory["total"] > found.memory["capacity"] == 1000


def test_the_estimate():
    config = tiny_config()
    found = [message(2e9), message(1e9, times=3), message(5e9, overlapped=True)]
    here = estimate(config, topology(), compiled(moved=16e9, found=found))
    assert here["seconds"]["memory"] == 16e9 / 800e9
    assert here["seconds"]["communication"] == pytest.approx(5e9 / 100e9)
    assert here["seconds"]["overlapped"] == pytest.approx(5e9 / 100e9)
    assert here["seconds"]["compute"] == flops(config, 4)["executed"] / 4 / 197e12
    assert here["step_seconds"] == pytest.approx(0.05 + 0.05)
    model = training_flops_per_token(config.model, 32) * 4 * 32
    assert here["mfu"] == pytest.approx(model / (here["step_seconds"] * 4 * 197e12))
    assert any("float32" in note for note in here["assumptions"])
    unknown = estimate(config, topology(bandwidth=None), compiled())
    assert (unknown["step_seconds"], unknown["mfu"]) == (None, None)


def test_hosts_are_joined_by_the_network():
    places, capacity = [0] * 8 + [1] * 8, Capacity(None, 800e9, 100e9, far_link=50e9)
    assert link_of(message(1, groups=((0, 7), (8, 15))), places, capacity) == 100e9
    assert link_of(message(1, groups=((0, 8), (1, 9))), places, capacity) == 50e9


def test_the_network_between_slices_must_be_known():
    chips = [SimpleNamespace(slice_index=index // 2) for index in range(4)]
    slow = compiled(found=[message(1e9, groups=((0, 2), (1, 3)))], chips=chips)
    assert estimate(tiny_config(), topology(), slow)["step_seconds"] is None
    known = estimate(tiny_config(), topology(far_link=2e9), slow)
    assert known["seconds"]["communication"] == pytest.approx(0.5)


def test_recomputed_flops():
    again = lambda **fields: recomputed_flops(tiny_config(**fields).model, 32)
    assert again(model__attention__implementation="dense") == 0
    assert 0 < again() == again(model__remat="dots") < again(model__remat="attention")
    assert again(model__remat="attention") < again(model__remat="full")
    assert again() < again(model__mlp__remat_steps=True)


def fake_compiler(log):
    """Return a fake result: 10 GiB per sequence and device, less with remat; full remat slower."""

    def compile_(config, there):
        log.append(config)
        shape = tuple(getattr(config.mesh, axis) for axis in ("data", "fsdp", "tensor", "context"))
        shape = tuple(4 if size == -1 else size for size in shape)
        rows = (config.train.microbatch or config.train.global_batch) // (shape[0] * shape[1])
        share = {"none": 10, "dots": 8, "attention": 5, "full": 4}[config.model.remat]
        total = share * rows * GIB
        return compiled(total, total <= 16 * GIB, 1e9 + 1e9 * shape[2] + 1e9 / rows, shape=shape)

    return compile_


def real_devices(count=4):
    return topology(count)._replace(devices=jax.devices("cpu") * count)


def test_suggestions(monkeypatch):
    monkeypatch.setattr(suggest, "_may_fit", lambda config, there: True)
    config = tiny_config(train__global_batch=32, mesh__data=-1)
    log = []
    rows, best = suggestions(config, topology(), fake_compiler(log))
    assert log[0] == config and not rows[0].compiled.fits
    assert len(log) <= 12
    assert rows[best].compiled.fits
    assert all(rows[best].rank() <= row.rank() for row in rows)
    changed = overrides_of(config, rows[best].config)
    assert set(changed) <= {
        "mesh.data", "mesh.fsdp", "mesh.tensor", "model.remat", "train.microbatch",
    }  # fmt: skip
    assert changed["train.microbatch"] < 32


def test_candidates_divide():
    config = tiny_config(train__global_batch=16, model__attention__heads=2)
    shapes = {
        tuple(vars(c.mesh).values())
        for c in meshes(config, real_devices(1), {"data": 9})  # all that are legal on one device
    }
    assert shapes == {(1, 1, 1, 1)}
    (one,) = meshes(config, real_devices(1), {"data": 9})
    assert one.train.microbatch is None
    assert [c.model.remat for c in policies(config)] == ["dots", "attention", "full"]
    best = Tried(config, compiled(), 1.0, 0.5)
    assert [c.train.microbatch for c in microbatches(best)] == [8]
    unfit = best._replace(compiled=compiled(fits=False))
    assert [c.train.microbatch for c in microbatches(unfit)] == [8, 4]


def test_nothing_legal_is_refused(monkeypatch):
    monkeypatch.setattr(suggest, "_may_fit", lambda config, there: False)

    def compile_(*_):
        raise UserError("mesh: no")

    with pytest.raises(UserError, match="mesh: no"):
        suggestions(tiny_config(), topology(), compile_)


def test_the_tables():
    config = tiny_config()
    found = {
        "fits": False, "topology": "v5e:2x2", "device": "TPU v5 lite", "devices": 4,
        "mesh": {"data": 1, "fsdp": 4}, "memory": compiled(20 * GIB).memory, "bytes": 8e9,
        "collectives": {}, "collectives_by_axes": {}, "loops_not_read": 0, "compile_seconds": 3.0,
        "xla_cost_analysis": {"flops": 1e9, "bytes": 1e9},
        **estimate(config, topology(), compiled()),
    }  # fmt: skip
    text = rendered(found)
    for words in ("DOES NOT FIT: 125% of the capacity", "mesh fsdp 4", "no collectives", "MFU"):
        assert words in text
    row = Tried(config, compiled(), 0.5, 0.25).summary()
    choice = {"suggestions": [row, row], "recommended": {"mesh.fsdp": 4, "model.remat": "full"}}
    assert "--config.mesh.fsdp=4 --config.model.remat=full" in rendered_choice(choice, 1)
    assert "nothing that was tried fits" in rendered_choice(choice | {"recommended": None}, 0)
    refused = found | {"collectives": None, "bytes": None, "step_seconds": None}
    refused["memory"] = dict.fromkeys(found["memory"]) | {"total": 20 * GIB, "capacity": 16 * GIB}
    assert "the compiler gave up" in rendered(refused)


has_libtpu = os.environ.get("TPU_LIBRARY_PATH") or importlib.util.find_spec("libtpu")
needs_libtpu = pytest.mark.skipif(
    not has_libtpu, reason="no libtpu: neither installed nor named by TPU_LIBRARY_PATH"
)


@needs_libtpu
@pytest.mark.slow
def test_tpus():
    code, out, err = command("--topology", "v5e:2x2", "--config.mesh.fsdp=4", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["device"], found["devices"], found["loops_not_read"]) == ("TPU v5 lite", 4, 0)
    assert found["collectives"]["all-gather"]["count"] > 0
    assert found["step_seconds"] > 0


@needs_libtpu
@pytest.mark.slow
def test_two_slices():
    flags = ("--config.mesh.data=2", "--config.mesh.fsdp=4", "--json")
    code, out, err = command("--topology", "2*v5e:2x2", *flags)
    assert code == 0, err
    found = json.loads(out)
    assert (found["devices"], found["mesh"]["data"]) == (8, 2)
    assert found["collectives_by_axes"]["data"]["all-reduce"]["bytes"] > 0
    assert found["step_seconds"] > 0


@needs_libtpu
@pytest.mark.slow
def test_a_step_too_large_for_a_tpu():
    large = {"model.dim": 2048, "model.layers": 8, "model.mlp.dim": 8192, "data.context": 2048}
    large |= {"train.global_batch": 64, "model.vocab_size": 32_000}
    code, out, err = command("--topology", "v5e:1x1", "--json", fields=QUICK | large)
    assert code == 1, err
    found = json.loads(out)
    assert found["fits"] is False
    assert found["memory"]["total"] > found["memory"]["capacity"]
    assert found["step_seconds"] is None
    assert "Traceback" not in err


@pytest.mark.slow
def test_suggestions_for_cpu_devices():
    code, out, err = command(
        "--topology", "cpu:4", "--suggest", "--json", "--config.model.layers=1"
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["fits"] and isinstance(found["recommended"], dict)
    assert len(found["suggestions"]) >= 6
    assert len({json.dumps(row["mesh"]) for row in found["suggestions"]}) >= 3
