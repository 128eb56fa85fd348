"""The HLO parser on nested loops, asynchronous and combined collectives, branches, kernels, and replica groups in every
notation."""

import jax
import numpy as np
import pytest

from zoo.inspect import hlo
from zoo.inspect.collectives import Collective, find_mesh_axes, parse_groups, sum_collectives
from zoo.inspect.executions import count_bytes_moved, list_executions

MODULE = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1, 0}: (3, {}, must-alias) }, \
entry_computation_layout={(f32[8]{0:T(256)})->f32[]}, replica_count=1, num_partitions=8

FileNames
1 "/some/file.py"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%take_one (p.0: f32[6,4,8], p.1: s32[]) -> f32[4,8] {
  %p.0 = f32[6,4,8]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %flat = f32[6,32]{1,0} bitcast(%p.0)
  %slice = f32[1,32]{1,0} dynamic-slice(%flat, %p.1, %zero), dynamic_slice_sizes={1,32}
  ROOT %out = f32[4,8]{1,0} bitcast(%slice)
}

%put_one (q.0: f32[6,4,8], q.1: f32[1,4,8], q.2: s32[]) -> f32[6,4,8] {
  %q.0 = f32[6,4,8]{2,1,0} parameter(0)
  %q.1 = f32[1,4,8]{2,1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[6,4,8]{2,1,0} dynamic-update-slice(%q.0, %q.1, %q.2, %zero.1, %zero.1)
}

%scattered (s: f32[8,8]) -> f32[4,8] {
  %s = f32[8,8]{1,0} parameter(0)
  ROOT %part = f32[4,8]{1,0} reduce-scatter(%s), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}, execution_thread="parallel"

%inner (i: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %i = (s32[], f32[4,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%i), index=0
  %v = f32[4,8]{1,0} get-tuple-element(%i), index=1
  %start = f32[4,8]{1,0} all-reduce-start(%v), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %done = f32[4,8]{1,0} all-reduce-done(%start)
  ROOT %both = (s32[], f32[4,8]{1,0}) tuple(%n, %done)
}

%outer (o: (s32[], f32[4,8], /*index=2*/f32[6,4,8])) -> (s32[], f32[4,8], f32[6,4,8]) {
  %o = (s32[], f32[4,8]{1,0}, /*index=2*/f32[6,4,8]{2,1,0}) parameter(0)
  %k = s32[] get-tuple-element(%o), index=0
  %w = f32[6,4,8]{2,1,0} get-tuple-element(%o), index=2
  %one = f32[4,8]{1,0} fusion(%w, %k), kind=kLoop, calls=%take_one, metadata={op_name="jit(f)/while (a) {b}, c="}
  %one.1 = f32[1,4,8]{2,1,0} bitcast(%one)
  %new = f32[6,4,8]{2,1,0} fusion(%w, %one.1, %k), kind=kLoop, calls=%put_one
  %pair = (s32[], f32[4,8]{1,0}) tuple(%k, %one)
  %loop = (s32[], f32[4,8]{1,0}) while(%pair), condition=%inner_more, body=%inner, \
backend_config={"known_trip_count":{"n":"5"},"other":{"n":"9"}}
  %v.1 = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %all = (s32[], f32[4,8]{1,0}, f32[6,4,8]{2,1,0}) tuple(%k, %v.1, %new)
}

%small (a: f32[4,8]) -> f32[4,8] {
  ROOT %a = f32[4,8]{1,0} parameter(0)
}

%large (b: f32[4,8]) -> f32[4,8] {
  %b = f32[4,8]{1,0} parameter(0)
  ROOT %turned = f32[4,8]{1,0} collective-permute(%b), channel_id=3, \
source_target_pairs={{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}
}

ENTRY %main (arg.0: f32[4,8], arg.1: s32[], arg.2: f32[6,4,8], arg.3: f32[8,8]) -> f32[4,8] {
  %arg.0 = f32[4,8]{1,0} parameter(0), sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}
  %arg.1 = s32[] parameter(1)
  %arg.2 = f32[6,4,8]{2,1,0} parameter(2)
  %arg.3 = f32[8,8]{1,0} parameter(3)
  %c = f32[2]{0} constant({1, 2})
  %kernel = (f32[4,8]{1,0}, s8[64]{0}) custom-call(f32[4,8]{1,0} %arg.0), custom_call_target="__cublas$gemm", \
called_computations={}, backend_config={"gemm_backend_config":{"alpha":"1"}}
  %product = f32[4,8]{1,0} get-tuple-element(%kernel), index=0
  %gathered = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%product), channel_id=2, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true
  %whole = f32[16,8]{1,0} all-gather-done(%gathered)
  %sent = ((f32[8,8]{1,0}), f32[4,8]{1,0}) async-start(%arg.3), async_execution_thread="parallel", calls=%scattered
  %came = f32[4,8]{1,0} async-done(%sent)
  %packed = (s32[], f32[4,8]{1,0}, f32[6,4,8]{2,1,0}) tuple(%arg.1, %came, %arg.2)
  %layers = (s32[], f32[4,8]{1,0}, f32[6,4,8]{2,1,0}) while(%packed), condition=%outer_more, body=%outer, \
backend_config={"known_trip_count":{"n":"6"}}
  %x.1 = f32[4,8]{1,0} get-tuple-element(%layers), index=1
  %either = f32[4,8]{1,0} conditional(%arg.1, %x.1, %x.1), branch_computations={%small, %large}
  %free = (s32[], f32[4,8]{1,0}) while(%pair.1), condition=%until, body=%inner
  %sums = (f32[4,8]{1,0}, bf16[3]{0}) all-reduce(%either, %c), channel_id=4, replica_groups={}, to_apply=%add
  ROOT %result = f32[4,8]{1,0} copy(%x.1)
}
"""


@pytest.fixture(scope="module")
def module():
    return hlo.parse_module(MODULE)


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 1, 2), ("data", "fsdp", "context", "tensor"))


def test_parse_header_and_parameters(module):
    assert (
        hlo.count_devices(module) == 8
        and hlo.count_parameters(module) == 4
        and hlo.find_aliased_parameters(module) == {1, 3}
    )
    with pytest.raises(ValueError, match=r"no computation is marked ENTRY"):
        hlo.parse_module("HloModule nothing\n")


def test_executions_multiply_trip_counts_of_loops(module):
    executions, endless = list_executions(module)
    times = {}
    for execution in executions:
        times.setdefault(execution.instruction.name, []).append(execution.times)
    assert times["start"] == [30, 1] and times["one"] == [6] and times["kernel"] == [1]
    assert endless == ["free"]
    assert "done" not in times and "slice" not in times and "loop" not in times
    assert times["turned"] == [1] and "a" not in times  # only the branch that moves more bytes


def test_bytes_of_slices_and_in_place_updates(module):
    executions, _ = list_executions(module)
    moved = {
        execution.instruction.name: hlo.count_instruction_bytes(module, execution.instruction, execution.computation)
        for execution in executions
    }
    row = 4 * 8 * 4
    assert moved["one"] == row + 4 + row  # reads one of six layers and its index, writes one
    assert moved["new"] == row + 4 + row  # reads and writes the update, not the other layers
    assert moved["kernel"] == row + row + 64
    assert moved["result"] == 2 * row and moved["pair"] == 0
    assert moved["start"] == 2 * row and moved["gathered"] == row + 4 * row
    assert count_bytes_moved(module, executions) == sum(e.times * moved[e.instruction.name] for e in executions)
    assert [
        hlo.count_shape_bytes(shape)
        for shape in ("pred[3]", "s4[3]", "bf16[2,3]{1,0:T(8,128)S(1)}", "f8e4m3fn[5]", "token[]")
    ] == [*(3, 2, 12, 5, 0)]


def test_collectives_are_summed_by_axis(module, mesh):
    found, _ = list_executions(module)
    row = 4 * 8 * 4
    assert set(sum_collectives(module, found, mesh, 8)) == {
        Collective("all-reduce", ("tensor",), "", 31, 31, 31 * row, asynchronous=31),
        Collective("all-gather", ("data", "fsdp"), "", 1, 1, 4 * row, asynchronous=1),
        Collective("reduce-scatter", ("tensor",), "", 1, 1, 2 * row, asynchronous=1),
        Collective("collective-permute", ("data",), "", 1, 1, row),
        Collective("all-reduce", ("data", "fsdp", "tensor"), "", 1, 2, row + 8),
    }
    assert {row.axes for row in sum_collectives(module, found, None, 8)} == {None}


TENSOR, DATA = {(0, 1), (2, 3), (4, 5), (6, 7)}, {(0, 4), (1, 5), (2, 6), (3, 7)}
NOTATIONS = {
    "as they are": ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", TENSOR, ("tensor",)),
    "in another order": ("replica_groups={{3,2},{1,0},{4,5},{7,6}}", TENSOR, ("tensor",)),
    "counted up": ("replica_groups=[4,2]<=[8]", TENSOR, ("tensor",)),
    "transposed": ("replica_groups=[4,2]<=[2,4]T(1,0)", DATA, ("data",)),
    "transposed, three dims": ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", {(0, 2), (1, 3), (4, 6), (5, 7)}, ("fsdp",)),
    "one group": ("replica_groups=[1,8]<=[8]", {tuple(range(8))}, ("data", "fsdp", "tensor")),
    "none written": ("replica_groups={}", {tuple(range(8))}, ("data", "fsdp", "tensor")),
    "alone": ("replica_groups=[8,1]<=[8]", {(i,) for i in range(8)}, ()),
    "a mesh": ("replica_groups=mesh['a'=4,'b'=2] {'b'}", TENSOR, ("tensor",)),
    "a mesh, two axes": ("replica_groups=mesh[a=2,b=2,c=2] {a,c}", {(0, 1, 4, 5), (2, 3, 6, 7)}, ("data", "tensor")),
    "a mesh, its order": ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", TENSOR, ("tensor",)),
    "a mesh, its list": ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", DATA, ("data",)),
    "the first half of an axis": ("replica_groups=mesh['a'=8] {'a':(1)2}", DATA, ("data",)),
    "the last half of an axis": ("replica_groups=mesh['a'=8] {'a':(4)2}", TENSOR, ("tensor",)),
    "no axis": ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", {(0, 3), (1, 2), (4, 7), (5, 6)}, None),
    "uneven": ("replica_groups={{0,1,2},{3,4,5,6,7}}", {(0, 1, 2), (3, 4, 5, 6, 7)}, None),
}


@pytest.mark.parametrize(("text", "groups", "axes"), NOTATIONS.values(), ids=NOTATIONS)
def test_replica_groups_in_every_notation(text, groups, axes, mesh):
    instruction = hlo.parse_instruction("x", f"f32[4] all-reduce(%p), channel_id=1, {text}, use_global_device_ids=true")
    found = parse_groups(instruction, 8)
    assert found == {frozenset(group) for group in groups}
    assert find_mesh_axes(found, mesh) == axes


def test_groups_of_no_axis_are_reported_in_hlo_notation(mesh):
    text = MODULE.replace("{{0,1},{2,3},{4,5},{6,7}}", "{{0,3},{1,2},{4,7},{5,6}}").replace("[4,2]<=[8]", "new(8)")
    module = hlo.parse_module(text)
    found, _ = list_executions(module)
    groups = {row.kind: row.groups for row in sum_collectives(module, found, mesh, 8) if row.axes is None}
    assert groups == {"all-reduce": "{{0,3},{1,2},{4,7},{5,6}}", "reduce-scatter": "unknown"}


def test_permutation_along_two_axes(mesh):
    text = "f32[4] collective-permute(%p), source_target_pairs={{0,3},{3,0},{4,4}}"
    assert find_mesh_axes(parse_groups(hlo.parse_instruction("x", text), 8), mesh, permute=True) == ("fsdp", "tensor")


TPU_MODULE = """\
HloModule jit_step, num_partitions=8

%piece.0 (a: bf16[8,4]) -> (bf16[8,4], bf16[8,16]) {
  %a = bf16[8,4]{1,0} parameter(0)
  %gather.0 = bf16[8,16]{1,0} all-gather(%a), channel_id=5, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}
  ROOT %both.0 = (bf16[8,4]{1,0}, bf16[8,16]{1,0}) tuple(%a, %gather.0)
}

%piece.1 (b: bf16[8,4]) -> bf16[8,16] {
  %b = bf16[8,4]{1,0} parameter(0)
  ROOT %gather.1 = bf16[8,16]{1,0:S(1)} all-gather(%b), channel_id=5, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}
}

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %p = (s32[]{:T(128)}, bf16[8,4]{1,0}) parameter(0)
  %one = s32[]{:T(128)} constant(2)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[8,4]{1,0} get-tuple-element(%p), index=1
  %i.1 = s32[]{:T(128)} copy(%i)
  %next = s32[]{:T(128)} add(%i.1, %one)
  %async-collective-start = (bf16[8,4]{1,0}, bf16[8,16]{1,0}) fusion(%x), kind=kCustom, calls=%piece.0
  %async_collective_fusion.7 = bf16[8,16]{1,0} fusion(%x), kind=kOutput, calls=%piece.1
  %async-collective-done = bf16[8,16]{1,0} fusion(%x), kind=kCustom, calls=%piece.1
  %waited = bf16[8,16]{1,0} all-gather(%x), channel_id=6, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}
  %sum-start = bf16[8,4]{1,0} all-reduce-start(%x), replica_groups=[4,2]<=[8], backend_config={"is_sync":true}
  %sum-done = bf16[8,4]{1,0} all-reduce-done(%sum-start)
  ROOT %both = (s32[]{:T(128)}, bf16[8,4]{1,0}) tuple(%next, %sum-done)
}

%condition (q: (s32[], bf16[8,4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(8)
  %q = (s32[]{:T(128)}, bf16[8,4]{1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %bound), direction=LT
}

ENTRY %main (y: bf16[8,4]) -> bf16[8,4] {
  %y = bf16[8,4]{1,0} parameter(0)
  %start = s32[]{:T(128)} constant(1)
  %packed = (s32[]{:T(128)}, bf16[8,4]{1,0}) tuple(%start, %y)
  %layers = (s32[]{:T(128)}, bf16[8,4]{1,0}) while(%packed), condition=%condition, body=%body
  ROOT %z = bf16[8,4]{1,0} get-tuple-element(%layers), index=1
}
"""


def test_collectives_of_a_tpu_count_once_however_many_pieces(mesh):
    module = hlo.parse_module(TPU_MODULE)
    executions, endless = list_executions(module)
    assert not endless  # 1, 3, 5, 7
    assert set(sum_collectives(module, executions, mesh, 8)) == {
        Collective("all-gather", ("data", "fsdp"), "", 8, 8, 8 * 8 * 16 * 2, asynchronous=4),
        Collective("all-reduce", ("tensor",), "", 4, 4, 4 * 8 * 4 * 2, asynchronous=0),
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [("direction=LT", "direction=NE"), ("constant(8)", "parameter(1)"), ("add(%i.1", "multiply(%i.1"),
     ("add(%i.1, %one)", "add(%i.1, %i)"), ("tuple(%start", "tuple(%y"), ("constant(2)", "constant(0)")],
)  # fmt: skip
def test_loops_that_do_not_count_up_have_no_trip_count(old, new):
    module = hlo.parse_module(TPU_MODULE.replace(old, new))
    assert list_executions(module)[1] == ["layers"]


def test_parser_reads_on_after_a_kernel_of_several_lines():
    """A TPU kernel's text has lines of its own, one of which begins like the end of a computation."""
    text = """HloModule step

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %kernel = f32[8]{0} custom-call(%x), backend_config={"custom_call_config": {
"block": 512
}}, metadata={op_name="step"}
  ROOT %sum = f32[8]{0} add(%x, %kernel)
}
"""
    module = hlo.parse_module(text)
    assert list(module.computations["main"]) == ["x", "kernel", "sum"] and module.roots["main"] == "sum"
