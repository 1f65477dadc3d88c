"""Collectives and bytes of compiled programs, against programs small enough to count by hand."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cem_jax.aot.collectives import _groups, collectives, totals
from cem_jax.aot.hlo import array_bytes, parse, runs
from cem_jax.aot.traffic import bytes_moved

# From a TPU: an all-gather in three pieces beside products, and an all-reduce of which each device
# keeps a slice, in a loop without a noted trip count.
OF_A_TPU = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%start (p0: bf16[8,32]) -> (bf16[8,32], bf16[8,128]) {
  %p0 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %g0 = bf16[8,128]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=7, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true
  ROOT %c0 = (bf16[8,32]{1,0}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) custom-call(%g0), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p1: bf16[8,32]) -> bf16[8,128] {
  %p1 = bf16[8,32]{1,0} parameter(0)
  ROOT %g1 = bf16[8,128]{1,0} all-gather(%p1), channel_id=7, replica_groups=[2,4]<=[4,2]T(1,0)
}

%all-reduce-scatter.2 (p2: f32[8,128]) -> f32[8,32] {
  %p2 = f32[8,128]{1,0} parameter(0)
  %r2 = f32[8,128]{1,0} all-reduce(%p2), channel_id=8, \
replica_groups=mesh['data'=1,'fsdp'=4,'tensor'=2,'context'=1] {'fsdp'}, to_apply=%add
  %zero = s32[]{:T(128)} constant(0)
  ROOT %d2 = f32[8,32]{1,0} dynamic-slice(%r2, %zero, %zero), dynamic_slice_sizes={8,32}
}

%body (s: (s32[], bf16[8,32], f32[8,128])) -> (s32[], bf16[8,32], f32[8,128]) {
  %s = (s32[]{:T(128)}, bf16[8,32]{1,0}, /*index=2*/f32[8,128]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %x = bf16[8,32]{1,0} get-tuple-element(%s), index=1
  %y = f32[8,128]{1,0} get-tuple-element(%s), index=2
  %f0 = (bf16[8,32]{1,0}, bf16[8,128]{1,0}) fusion(%x), kind=kCustom, calls=%start
  %f1 = bf16[8,128]{1,0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.1
  %f2 = f32[8,32]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.2
  ROOT %t = (s32[]{:T(128)}, bf16[8,32]{1,0}, f32[8,128]{1,0}) tuple(%i, %x, %y)
}

%condition (s.1: (s32[], bf16[8,32], f32[8,128])) -> pred[] {
  %s.1 = (s32[]{:T(128)}, bf16[8,32]{1,0}, f32[8,128]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %n = s32[]{:T(128)} constant(LIMIT)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %n), direction=LT
}

ENTRY %main (x.2: bf16[8,32], y.2: f32[8,128]) -> bf16[8,32] {
  %x.2 = bf16[8,32]{1,0} parameter(0)
  %y.2 = f32[8,128]{1,0} parameter(1)
  %nought = s32[]{:T(128)} constant(START)
  %copied = s32[]{:T(128)} copy(%nought)
  %t.2 = (s32[]{:T(128)}, bf16[8,32]{1,0}, f32[8,128]{1,0}) tuple(%copied, %x.2, %y.2)
  %w = (s32[]{:T(128)}, bf16[8,32]{1,0}, f32[8,128]{1,0}) while(%t.2), condition=%condition, \
body=%body
  %p = bf16[8,32]{1,0} get-tuple-element(%w), index=1
  ROOT %q = bf16[8,32]{1,0} collective-permute(%p), channel_id=9, \
source_target_pairs={{0,0},{1,3},{3,1}}
}
"""
MESH = {"data": 1, "fsdp": 4, "tensor": 2, "context": 1}


def of_a_tpu(limit="6", start="0"):
    return parse(OF_A_TPU.replace("LIMIT", limit).replace("START", start))


def test_pieces_slices_and_loops_of_a_tpu():
    found = collectives(of_a_tpu(), MESH)
    assert [(one.kind, one.axes, one.times, one.overlapped) for one in found] == [
        ("collective-permute", "fsdp", 1, False),
        ("all-gather", "fsdp", 6, True),
        ("reduce-scatter", "fsdp", 6, False),
    ]
    gathered, kept = 8 * 128 * 2, 8 * 128 * 4
    assert totals(found) == {
        "reduce-scatter": {
            "count": 6, "bytes": 6 * kept, "sent": 6 * kept * 3 // 4, "overlapped": 0,
        },
        "all-gather": {
            "count": 6, "bytes": 6 * gathered, "sent": 6 * gathered * 3 // 4,
            "overlapped": 6 * gathered * 3 // 4,
        },
        "collective-permute": {"count": 1, "bytes": 512, "sent": 512, "overlapped": 0},
    }  # fmt: skip


# Two slices of two devices: a gather beside a product, and a sum with no work beside it.
OF_TWO_SLICES = """
HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8,32]) -> f32[16,32] {
  %x = f32[8,32]{1,0} parameter(0)
  %t = token[] after-all()
  %s1 = (f32[8,32]{1,0}, u32[], token[]) send(%x, %t), channel_id=3, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="gather_0",\
_xla_megascale_transfer_type="ALL_GATHER"}
  %r1 = (f32[16,32]{1,0}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="gather_0"}
  %busy = f32[8,32]{1,0} fusion(%x), kind=kLoop, calls=%nothing
  %rd1 = (f32[16,32]{1,0}, token[]) recv-done(%r1), channel_id=2, is_host_transfer=true
  %s2 = (f32[8,32]{1,0}, u32[], token[]) send(%busy, %t), channel_id=5, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="sum_0",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %r2 = (f32[8,32]{1,0}, u32[], token[]) recv(%t), channel_id=4, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="sum_0"}
  %rd2 = (f32[8,32]{1,0}, token[]) recv-done(%r2), channel_id=4, is_host_transfer=true
  ROOT %out = f32[16,32]{1,0} get-tuple-element(%rd1), index=0
}

%nothing (p: f32[8,32]) -> f32[8,32] {
  ROOT %p = f32[8,32]{1,0} parameter(0)
}
"""


def test_between_slices():
    mesh = {"data": 2, "fsdp": 2}
    gathered, summed = collectives(parse(OF_TWO_SLICES), mesh, slices=(0, 0, 1, 1))
    size = 8 * 32 * 4
    assert gathered.groups == summed.groups == ((0, 2), (1, 3))
    assert gathered.axes == summed.axes == "data"
    assert (gathered.kind, gathered.bytes, gathered.sent) == ("all-gather", 2 * size, size)
    assert (summed.kind, summed.bytes, summed.sent) == ("all-reduce", size, size)
    assert (gathered.overlapped, summed.overlapped) == (True, False)


def test_a_loop_with_unknown_count_counts_once_and_is_uncertain():
    found = collectives(of_a_tpu(start="2"), MESH)
    assert [(one.times, one.certain) for one in found] == [(1, True), (1, False), (1, False)]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=4,'b'=1,'c'=1] {'a','c'}", ((0, 1, 2, 3),)),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("{}", ((0, 1, 2, 3),)),
    ],
)
def test_every_format_of_groups(text, groups):
    assert _groups(f", channel_id=1, replica_groups={text}, dimensions={{0}}", 4) == groups


def test_sizes():
    assert array_bytes("f32[]") == 4
    assert array_bytes("(bf16[8,32]{1,0:T(8,128)(2,1)}, /*index=1*/pred[3], s4[5])") == 512 + 3 + 3
    assert array_bytes("(bf16[8]{0:T(8)S(1)}, bf16[2]{0})", main_memory=True) == 4
    assert array_bytes("(token[], f8e4m3fn[7])") == 7


def test_text_without_a_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing")


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile()


def test_bytes_match_xla_without_loops():
    done = compiled(lambda x, y: jnp.tanh(x @ y).sum(0), (96, 64), (64, 128))
    assert bytes_moved(parse(done.as_text())) == pytest.approx(
        done.cost_analysis()["bytes accessed"], rel=0.05
    )


def test_a_loop_over_stacked_layers_reads_each_once():
    layers, rows, width = 12, 64, 96

    def forward(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, weights)

    program = parse(compiled(forward, (rows, width), (layers, width, width)).as_text())
    assert layers in [run.times for run in runs(program)]
    assert all(run.certain for run in runs(program))
    # x is read and written by product and tanh, and kept; a layer's weights are sliced and read
    least = 4 * layers * (2 * rows * width + width * width)
    assert least < bytes_moved(program) < 4.5 * least


def test_a_real_program_over_eight_devices():
    script = """
        import jax, jax.numpy as jnp, json
        from jax.sharding import NamedSharding, PartitionSpec as P
        jax.config.update("jax_num_cpu_devices", 8)
        from cem_jax.aot.collectives import collectives
        from cem_jax.aot.hlo import parse
        from cem_jax.sharding.mesh import make_mesh

        mesh = make_mesh({"data": 2, "fsdp": 4})
        spec = lambda *axes: NamedSharding(mesh, P(*axes))
        x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=spec(("data", "fsdp")))
        w = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=spec(None, "fsdp"))
        gathered = lambda w: jax.lax.with_sharding_constraint(w, spec())

        def loss(x, w):
            return jax.lax.scan(lambda x, w: (x @ gathered(w), None), x, w)[0].sum()

        program = parse(jax.jit(loss).lower(x, w).compile().as_text())
        for one in collectives(program, mesh.shape):
            print(one.kind, one.axes, one.times, one.bytes, one.sent)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    gathers = [row for row in rows if row[0] == "all-gather"]
    # per layer, or all at once before the loop: the same bytes
    assert sum(int(row[2]) * int(row[3]) for row in gathers) == 5 * 64 * 64 * 4
    assert {row[1] for row in gathers} == {"fsdp"}
    assert ["all-reduce", "data+fsdp", "1", "4", "7.0"] in rows


def test_axes_are_found_in_the_groups():
    text = OF_A_TPU.replace("LIMIT", "1").replace("START", "0")
    for groups, axes in (
        ("[4,2]<=[8]", "tensor"),
        ("[1,8]<=[8]", "fsdp+tensor"),
        ("{{0,3},{1,2},{4,7},{5,6}}", "other"),
        ("[8,1]<=[8]", "none"),
    ):
        program = parse(text.replace("[2,4]<=[4,2]T(1,0)", groups))
        (gather,) = (x for x in collectives(program, MESH) if x.kind == "all-gather")
        assert gather.axes == axes
        assert np.isclose(gather.sent, gather.bytes * (1 - 1 / len(gather.groups[0])))
