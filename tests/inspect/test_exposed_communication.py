"""Exposed communication of programs whose schedule is known by construction.

A product takes 1 second in float32. A gather within a host of 4 devices takes 4 seconds on fast links, and a
permutation between hosts 8 on the network.
"""

import dataclasses
import json

import jax.numpy as jnp
import pytest

import zoo
from scripts.exposed import Sizes, compile_step
from tests.aot import imagine
from zoo.inspect.collectives import sum_collectives
from zoo.inspect.executions import list_executions
from zoo.inspect.exposed_communication import add_seconds, read_schedule
from zoo.inspect.hlo import parse_module
from zoo.parallel.chips import CHIPS, Chip

FLOPS = 2.0 * 16 * 32 * 32
RATES = {"float32": FLOPS, "bfloat16": 2 * FLOPS, "float32 highest": FLOPS / 4, "float8": 4 * FLOPS}
MOVED = 4 * 512 * 4
CHIP = Chip("some", "gpu", 10**9, 1e9, RATES, link=MOVED * 3 / 4 / 4, network=MOVED / 8, source="")

HOSTS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
GATHER = f"(f32[1,512], f32[4,512]) all-gather-start(%s), {HOSTS}, dimensions={{0}}"
SYNCHRONOUS = f'{GATHER}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}'
PERMUTE = "(f32[4,512], f32[4,512]) collective-permute-start(%big), source_target_pairs={{0,4},{4,0},{1,1}}"
DONE = "f32[4,512] all-gather-done"
PAIR = "(f32[1,512], f32[4,512])"
PRODUCT = "f32[16,32] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
ARRAYS = {"x": "f32[16,32]", "w": "f32[32,32]", "s": "f32[1,512]", "big": "f32[4,512]"}


def write_entry(*parts):
    """Write a module whose entry computation has these instructions; a part of several lines is a computation."""
    computations = [part for part in parts if "\n" in part]
    parameters = [f"%{name} = {shape} parameter({number})" for number, (name, shape) in enumerate(ARRAYS.items())]
    entry = write_computation("ENTRY %main", *parameters, *(part for part in parts if "\n" not in part))
    return "\n\n".join(["HloModule step, is_scheduled=true, num_partitions=8", *computations, entry])


def write_computation(name, *lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"{name} (p: (s32[])) -> (s32[]) {{\n{body}\n}}"


def multiply(*names):
    return [f"%{name} = {PRODUCT}" for name in names]


def write_loop(*body, trips, carried="", initial=""):
    """Write the body of a loop, whose tuple holds a counter, the arrays and what else is carried, and the loop."""
    arrays = enumerate(ARRAYS.items(), start=1)
    return [
        write_computation(
            "%body",
            "%p = (s32[], ...) parameter(0)",
            "%i = s32[] get-tuple-element(%p), index=0",
            *(f"%{name} = {shape} get-tuple-element(%p), index={number}" for number, (name, shape) in arrays),
            *body,
            f"ROOT %out = (s32[], ...) tuple(%i, %x, %w, %s, %big{carried})",
        ),
        "%zero = s32[] constant(0)",
        f"%packed = (s32[], ...) tuple(%zero, %x, %w, %s, %big{initial})",
        "%loop = (s32[], ...) while(%packed), condition=%condition, body=%body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
    ]


def read(text, chip=CHIP):
    """Return times, products, and the seconds on the links, of the products and exposed, by the name of the start."""
    rows = read_schedule(parse_module(text), None, 8, chip, 4)
    return {
        row.instruction: (row.times, row.products, row.link_seconds, row.product_seconds, row.exposed_seconds)
        for row in rows
    }


def test_products_between_start_and_done_hide_their_seconds():
    text = write_entry(*multiply("p0"), f"%g = {GATHER}", *multiply("p1", "p2"), f"%d = {DONE}(%g)", *multiply("p3"))
    assert read(text) == {"g": (1, 2, 4.0, 2.0, 2.0)}


def test_nothing_is_exposed_beside_longer_products():
    text = write_entry(f"%g = {GATHER}", *multiply("p1", "p2", "p3", "p4", "p5"), f"%d = {DONE}(%g)")
    assert read(text) == {"g": (1, 5, 4.0, 5.0, 0.0)}


def test_synchronous_collectives_are_exposed():
    plain = GATHER.replace("-start", "").replace("(f32[1,512], f32[4,512])", "f32[4,512]")
    text = write_entry(f"%g = {SYNCHRONOUS}", *multiply("p1"), f"%d = {DONE}(%g)", f"%h = {plain}", *multiply("p2"))
    assert read(text) == {"g": (1, 0, 4.0, 0.0, 4.0), "h": (1, 0, 4.0, 0.0, 4.0)}


def test_loops_count_by_their_trips():
    loop = write_loop(f"%g = {GATHER}", *multiply("p1"), f"%d = {DONE}(%g)", *multiply("p2"), trips=6)
    assert read(write_entry(*loop)) == {"g": (6, 6, 24.0, 6.0, 18.0)}
    unknown = write_entry(*loop).replace("known_trip_count", "other")
    assert read(unknown) == {"g": (1, 1, 4.0, 1.0, 3.0)}


def test_products_of_a_loop_hide_a_transfer_around_it():
    loop = write_loop(*multiply("p1"), trips=3)
    assert read(write_entry(f"%g = {GATHER}", *loop, f"%d = {DONE}(%g)")) == {"g": (1, 3, 4.0, 3.0, 1.0)}
    loop = write_loop(*multiply("p1"), trips=1000)
    assert read(write_entry(f"%g = {GATHER}", *loop, f"%d = {DONE}(%g)")) == {"g": (1, 1000, 4.0, 1000.0, 0.0)}


def test_done_of_a_start_in_the_iteration_before():
    """The first start is before the loop and the last done behind it, as in pipelined gathers."""
    done = [f"%before = {PAIR} get-tuple-element(%p), index=5", f"%d = {DONE}(%before)"]
    after = [*multiply("p3"), f"%last = {PAIR} get-tuple-element(%loop), index=5", f"%e = {DONE}(%last)"]
    carried = {"trips": 3, "carried": ", %g", "initial": ", %first"}

    loop = write_loop(*multiply("p1", "p2"), *done, f"%g = {GATHER}", **carried)
    found = read(write_entry(f"%first = {GATHER}", *loop, *after))
    assert found == {"first": (1, 2, 4.0, 2.0, 2.0), "g": (3, 2 + 2 + 1, 12.0, 5.0, 7.0)}

    loop = write_loop(f"%g = {GATHER}", *multiply("p1", "p2"), *done, **carried)
    found = read(write_entry(f"%first = {GATHER}", *loop, *after))  # two are on the links, the older one is covered
    assert found == {"first": (1, 2, 4.0, 2.0, 2.0), "g": (3, 3 * 2 + 2 * 2 + 1, 12.0, 2 * 2.0 + 1.0, 7.0)}


def test_a_product_hides_one_of_two_transfers_on_a_link():
    starts = [f"%a = {GATHER}", f"%b = {GATHER}"]
    dones = [f"%c = {DONE}(%a)", f"%d = {DONE}(%b)"]
    text = write_entry(*starts, *multiply("p1", "p2", "p3", "p4", "p5"), dones[0], *multiply("p6"), dones[1])
    assert read(text) == {"a": (1, 5, 4.0, 4.0, 0.0), "b": (1, 6, 4.0, 2.0, 2.0)}
    text = write_entry(*starts, *multiply("p1"), dones[1], *multiply("p2"), dones[0])
    assert read(text) == {"a": (1, 2, 4.0, 2.0, 3.0), "b": (1, 1, 4.0, 0.0, 4.0)}, "b is behind a on the links"


def test_a_product_hides_transfers_on_both_links():
    text = write_entry(
        *(f"%a = {PERMUTE}", f"%b = {GATHER}", *multiply("p1", "p2", "p3")),
        *("%c = f32[4,512] collective-permute-done(%a)", f"%d = {DONE}(%b)"),
    )
    assert read(text) == {"a": (1, 3, 8.0, 3.0, 5.0), "b": (1, 3, 4.0, 3.0, 1.0)}


def test_collectives_in_an_asynchronous_computation_end_together():
    """As XLA's GPU compiler joins several, and writes the ones that it has no start of."""
    inner = write_computation(
        "%together",
        "%u = f32[1,512] parameter(0)",
        f"%one = f32[4,512] all-gather(%u), {HOSTS}, dimensions={{0}}",
        f"ROOT %two = f32[1,512] reduce-scatter(%one), {HOSTS}, dimensions={{0}}, to_apply=%add",
    )
    for opcode, called in (("async", "calls"), ("call", "to_apply")):
        start = f"%g = ((f32[1,512]), f32[1,512]) {opcode}-start(%s), {called}=%together"
        text = write_entry(inner, start, *multiply("p1", "p2", "p3", "p4", "p5"), f"%d = f32[1,512] {opcode}-done(%g)")
        assert read(text) == {"one": (1, 5, 4.0, 4.0, 0.0), "two": (1, 5, 4.0, 1.0, 3.0)}
        executions, _ = list_executions(parse_module(text))
        totals = sum_collectives(parse_module(text), executions, None, 8)
        assert {row.kind: row.asynchronous for row in totals} == {"all-gather": 1, "reduce-scatter": 1}


@pytest.mark.parametrize(
    ("operands", "attributes", "seconds"),
    [
        ("%x, %w", "", 1.0),
        ("%x, %w", ", operand_precision={highest,highest}", 4.0),
        ("%x, %w", ', metadata={op_name="highest"}', 1.0),
        ("%xb, %wb", "", 0.5),
        ("%xb, %w", "", 1.0),
        ("%xh, %xh", "", 0.5),
        ("%x8, %x8", "", 0.25),
        ("%xd, %w", "", 4.0),
    ],
)
def test_seconds_of_a_product_are_at_the_peak_of_its_dtype(operands, attributes, seconds):
    """float64 has no rate on the data sheets, and takes the one of float32 at the highest precision."""
    dtypes = {"xb": "bf16", "wb": "bf16", "xh": "f16", "x8": "f8e4m3fn", "xd": "f64"}
    casts = [f"%{name} = {dtype}[16,32] convert(%x)" for name, dtype in dtypes.items()]
    line = f"%p = {PRODUCT}{attributes}".replace("%x, %w", operands)
    (found,) = read(write_entry(*casts, f"%g = {GATHER}", line, f"%d = {DONE}(%g)")).values()
    assert found == (1, 1, 4.0, seconds, 4.0 - seconds)


def test_kernels_of_unknown_flops_hide_nothing():
    kernel = '%k = f32[16,32] custom-call(%x), custom_call_target="tpu_custom_call"'
    assert read(write_entry(f"%g = {GATHER}", kernel, f"%d = {DONE}(%g)")) == {"g": (1, 1, 4.0, 0.0, 4.0)}


def test_other_operations_hide_nothing():
    assert read(write_entry(f"%g = {GATHER}", "%y = f32[16,32] exponential(%x)", f"%d = {DONE}(%g)")) == {
        "g": (1, 0, 4.0, 0.0, 4.0)
    }


PIECE = f"all-gather(%a), channel_id=5, {HOSTS}, dimensions={{0}}"
PIECES = (
    write_computation("%first", "%a = f32[1,512] parameter(0)", f"ROOT %g = f32[4,512] {PIECE}"),
    write_computation(
        "%middle",
        *("%a = f32[1,512] parameter(0)", "%u = f32[16,32] parameter(1)", "%v = f32[32,32] parameter(2)"),
        "%m = f32[16,32] convolution(%u, %v), dim_labels=bf_io->bf",
        f"%h = f32[4,512] {PIECE}",
        "ROOT %both = (f32[4,512], f32[16,32]) tuple(%h, %m)",
    ),
)


def test_pieces_of_a_collective_on_a_tpu_are_one_transfer():
    """It lasts from the first fusion of its channel to the last, and products are fused with the pieces."""
    text = write_entry(
        *PIECES,
        *multiply("p0"),
        "%async-collective-start = f32[4,512] fusion(%s), kind=kCustom, calls=%first",
        "%fusion.1 = (f32[4,512], f32[16,32]) fusion(%s, %x, %w), kind=kOutput, calls=%middle",
        *multiply("p1"),
        "%async-collective-done = f32[4,512] fusion(%s), kind=kCustom, calls=%first",
        *multiply("p2"),
    )
    assert read(text) == {"g": (1, 2, 4.0, 2.0, 2.0)}
    assert read(text.replace("%async-collective", "%fused-collective")) == {"g": (1, 0, 4.0, 0.0, 4.0)}


def test_schedules_that_cannot_be_read():
    text = write_entry(f"%g = {GATHER}", *multiply("p1"), f"%d = {DONE}(%g)")
    assert read_schedule(parse_module(text.replace(", is_scheduled=true", "")), None, 8, CHIP, 4) is None
    assert read(text, chip=None) == {"g": (1, 1, None, None, None)}


@pytest.fixture(scope="module")
def program():
    """A report of a CPU, with the schedule of another program in it."""
    report = zoo.inspect.compiled(lambda x: x @ x, jnp.ones((4, 4)))
    text = write_entry(f"%g = {GATHER}", *multiply("p1"), f"%d = {DONE}(%g)", f"%h = {SYNCHRONOUS}")
    module = parse_module(text)
    schedule = read_schedule(module, None, 8, CHIP, 4)
    totals = add_seconds(sum_collectives(module, list_executions(module)[0], None, 8), schedule)
    return dataclasses.replace(report, chip="some", schedule=schedule, collectives=totals), report


def test_report_sums_seconds_by_kind_and_axes(program):
    found, of_cpu = program
    (row,) = found.collectives
    assert (row.count, row.link_seconds, row.product_seconds, row.exposed_seconds) == (2, 8.0, 1.0, 7.0)
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["exposed_seconds"] == found.exposed_seconds == 7.0
    assert plain["collectives"][0]["exposed_seconds"] == 7.0 and plain["schedule"][0]["instruction"] == "h"
    assert of_cpu.as_dict()["exposed_seconds"] is None and of_cpu.schedule is None and of_cpu.chip is None


def test_report_prints_seconds(program):
    found, of_cpu = program
    header, row, total = str(found).splitlines()[-3:]
    assert header.endswith("bytes per device  asynchronous     link s  product s  exposed s")
    assert row.split()[-4:] == ["1", "8", "1", "7"]
    assert total == "exposed       7 of 8 s on the links (nominal rates of some)"
    assert "exposed" not in str(of_cpu)
    table = str(found.schedule).splitlines()
    assert table[0].split()[:7] == "bytes times kind axes products link_seconds product_seconds".split()
    assert table[1].split()[:2] == ["8.19", "kB"] and "4" in table[1].split()


@pytest.mark.aot
def test_no_product_runs_beside_the_gathers_of_a_scan():
    """XLA joins the gathers of a layer into one and puts its done behind its start: docs/compilers.md has the table."""
    imagine("h100:8")
    found = compile_step(Sizes(), "h100:8", "scan")
    links = CHIPS["h100"].link
    in_loops = {(row.kind, row.phase): row for row in found.schedule if row.times > 1}
    assert set(in_loops) == {("all-gather", "forward"), ("all-gather", "recomputed"), ("reduce-scatter", "backward")}
    for (kind, _), row in in_loops.items():
        assert row.link_seconds == pytest.approx(7 / 8 * row.bytes / links) and row.axes == ("fsdp",)
        assert (row.products == 0) == (row.exposed_seconds == row.link_seconds) == (kind == "all-gather")
    scatter = in_loops["reduce-scatter", "backward"]
    assert scatter.products == 23 * scatter.times
    assert scatter.exposed_seconds == pytest.approx(scatter.link_seconds - scatter.product_seconds)

    for total in found.collectives:
        rows = [row for row in found.schedule if (row.kind, row.axes) == (total.kind, total.axes)]
        assert (total.count, total.bytes) == (sum(row.times for row in rows), sum(row.bytes for row in rows))
        assert total.exposed_seconds == pytest.approx(sum(row.exposed_seconds for row in rows))
    assert 0 < found.exposed_seconds < sum(total.link_seconds for total in found.collectives)
    assert str(found).endswith("(nominal rates of h100)") and found.chip == "h100"
