"""What a compiled step holds at its peak, computes twice and moves outside fusions, by module."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import zoo
from tests.aot import imagine
from zoo.inspect import compiled
from zoo.inspect.buffers import list_buffers_at_peak, parse_assignment, read_buffers
from zoo.inspect.hlo import parse_module
from zoo.inspect.scopes import read_scope

ROWS, SEQ, VOCAB, EMBED, LAYERS, MLP = 4, 16, 32, 16, 2, 512
TOKENS = ROWS * SEQ


def compile_gradient(remat, **axes):
    """Compile the gradient of a Transformer with a wide MLP."""
    mesh = zoo.make_mesh(**axes, devices=None if axes else jax.devices()[:1])
    sizes = {"vocab": VOCAB, "embed": EMBED, "layers": LAYERS, "heads": 2, "mlp": MLP}
    model = zoo.init(lambda key: zoo.models.Transformer(**sizes, remat=remat, key=key), jax.random.key(0), mesh)
    tokens = jnp.zeros((ROWS, SEQ), jnp.int32)
    batch = zoo.place_batch({"tokens": tokens, "targets": tokens}, mesh)
    return compiled(zoo.value_and_grad(zoo.cross_entropy, mesh), model, batch)


@pytest.fixture(scope="module")
def kept():
    return compile_gradient("none")


@pytest.fixture(scope="module")
def recomputed():
    return compile_gradient("full")


def test_the_largest_buffers_are_residuals_of_the_wide_module(kept, recomputed):
    first = kept.buffers[0]
    assert (first.bytes, first.phase) == (4 * LAYERS * TOKENS * MLP, "forward")
    assert first.scope.startswith("Decoder/stack/Block/ffn.GatedMLP")
    assert f"%{first.instruction} = {first.shape}" in kept.text and first.opcode == "fusion"
    # Rematerialization holds one layer's, and computes them in the backward pass.
    largest = [buffer for buffer in recomputed.buffers if buffer.bytes == 4 * TOKENS * MLP]
    assert "recomputed" in {buffer.phase for buffer in largest if "ffn.GatedMLP" in buffer.scope}
    assert max(buffer.bytes for buffer in recomputed.buffers if buffer.opcode != "parameter") < first.bytes


@pytest.mark.parametrize("axes", [{}, pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.ci)])
def test_buffers_sum_to_the_memory_of_the_program(kept, axes):
    program = compile_gradient("none", **axes) if axes else kept
    total = sum(buffer.bytes for buffer in program.buffers)
    memory = program.memory
    assert 0.9 * memory.total < total <= memory.total  # the heap of the temporaries has holes
    names = {buffer.scope for buffer in program.buffers if buffer.opcode == "parameter"}
    assert {"model.stack.segments.0.blocks.0.ffn.up.weight", "batch.tokens"} <= {
        name.replace("args.0", "model").replace("args.1", "batch") for name in names
    }


@pytest.mark.aot
def test_buffers_sum_to_the_peak_that_a_gpu_compiler_reports():
    mesh = zoo.make_mesh(data=1, fsdp=4, tensor=2, devices=imagine("h100:8"))
    sizes = {"vocab": VOCAB, "embed": EMBED, "layers": LAYERS, "heads": 2, "mlp": MLP}
    make = lambda key: zoo.models.Transformer(**sizes, key=key)
    model = zoo.place(eqx.filter_eval_shape(make, jax.random.key(0)), mesh)
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ), "int32")
    batch = zoo.place_batch({"tokens": tokens, "targets": tokens}, mesh)
    program = compiled(zoo.value_and_grad(zoo.cross_entropy, mesh), model, batch)
    total = sum(buffer.bytes for buffer in program.buffers)
    assert total == pytest.approx(program.memory.peak, abs=1024)  # tables of pointers, of which XLA counts only some


def test_recomputed_flops_are_those_of_the_forward_pass(kept, recomputed):
    assert kept.recomputed == ()
    block = "Decoder/stack/Block"
    products = 2 * LAYERS * TOKENS * EMBED
    found = {row.scope: row.flops for row in recomputed.recomputed}
    scores = found.pop(f"{block}/mixer.Attention")
    assert found == {  # the gradient needs no result of `down`
        **{f"{block}/mixer.Attention/{name}": products * EMBED for name in ("query", "key", "value", "out")},
        **{f"{block}/ffn.GatedMLP/{name}": products * MLP for name in ("gate", "up")},
    }
    assert recomputed.compiled_flops - kept.compiled_flops == scores + sum(found.values())
    assert "FLOP per device recomputed in the backward pass" in str(recomputed) and "recomputed" not in str(kept)


def test_traffic_outside_fusions_is_listed_by_scope():
    def step(x, w):
        def layer(x, _):
            with jax.named_scope("router"):
                return jnp.sort(x, axis=1) @ w, None

        return jax.lax.scan(layer, x, length=3)[0]

    program = compiled(step, jnp.ones((64, 32)), jnp.ones((32, 32)))
    (row,) = [row for row in program.unfused if row.opcode == "sort"]
    assert (row.bytes, row.times, row.phase, row.scope) == (3 * 2 * 4 * 64 * 32, 3, "", "router")
    assert not {row.opcode for row in program.unfused} & {"dot", "parameter", "tuple", "while", "fusion"}
    assert sum(row.bytes for row in program.unfused) < program.bytes_moved
    assert str(program.unfused).splitlines()[0].split() == ["bytes", "times", "opcode", "phase", "scope"]
    assert program.stablehlo.startswith("module @jit_step") and "stablehlo.sort" in program.stablehlo


def test_a_call_finds_its_program_after_buffers_were_read(tmp_path):
    """Neither JAX's own cache of programs nor the persistent one changes, and no cached program is read."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    step = jax.jit(lambda x: (jnp.sin(x) @ x).sum())
    x = jnp.ones((32, 32))
    events = []

    def record(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        for name, value in zip(names, (str(tmp_path), True, 0.0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        program = compiled(step, x)
        entries = sorted(file.name for file in tmp_path.iterdir())
        assert program.buffers[0].bytes == x.nbytes and entries
        assert sorted(file.name for file in tmp_path.iterdir()) == entries
        events.clear()
        step(x).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert not [event for event in events if event.startswith("/jax/core/compile")]


BLOCK = "Decoder/stack/Block"
OP_NAMES = {
    "jit(step)/jvp(Decoder)/stack/while/body/closed_call/Block/ffn.GatedMLP/up/dot_general": (
        f"{BLOCK}/ffn.GatedMLP/up",
        "forward",
    ),
    "jit(step)/transpose(jvp(Decoder))/stack/while/body/checkpoint/rematted_computation/Block/ffn_norm/jit(silu)/mul": (
        f"{BLOCK}/ffn_norm",
        "recomputed",
    ),
    "jit(step)/transpose(jvp(Decoder/stack))/Block/mixer.Attention/transpose": (
        f"{BLOCK}/mixer.Attention",
        "backward",
    ),
    "jit(step)/jvp(Decoder)/stack/Block/mixer.Attention/(query/psum_invariant:key/psum_invariant)": (
        f"{BLOCK}/mixer.Attention",
        "forward",
    ),
    "jit(step)/vmap(router)/sort;jit(step)/add": ("router", ""),
    "batch": ("", ""),
}


@pytest.mark.parametrize("op_name", OP_NAMES)
def test_scopes_are_modules_and_passes(op_name):
    assert read_scope(op_name) == OP_NAMES[op_name]


HLO = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %wide = f32[64]{0} broadcast(%x), metadata={op_name="jit(f)/jvp(Model)/wide/broadcast"}
  %again = f32[64]{0} add(%wide, %wide), metadata={op_name="jit(f)/jvp(Model)/again/add"}
  %late = f32[16]{0} slice(%again), metadata={op_name="jit(f)/transpose(jvp(Model))/late/slice"}
  %chip = f32[8]{0} slice(%late)
  ROOT %out = f32[8]{0} slice(%late), metadata={op_name="jit(f)/out/slice"}
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 32, output shape is |f32[8]|, maybe-live-out:
 value: <5 out @0> (size=32,offset=0): f32[8]{0}
allocation 1: size 32, parameter 0, shape |f32[8]| at ShapeIndex {}:
 value: <1 x @0> (size=32,offset=0): f32[8]{0}
allocation 2: size 320, preallocated-temp:
 value: <2 wide @0> (size=256,offset=0): f32[64]{0:T(128)}
 value: <3 again @0> (size=256,offset=0): f32[64]{0}
 value: <4 late @0> (size=64,offset=256): f32[16]{0}
allocation 3: size 32, color 1, preallocated-temp:
 value: <6 chip @1> (size=32,offset=0): f32[8]{0}
"""
RANGES = """  BufferLiveRange:
    x{}:0-6
    wide{}:1-2
    again{}:2-3
    late{}:3-5
    chip{}:3-5
    out{}:5-6
"""


@pytest.mark.parametrize("main_memory_only", [False, True])
def test_buffers_of_an_assignment(main_memory_only):
    allocations = list(parse_assignment(ASSIGNMENT, RANGES, main_memory_only=main_memory_only))
    buffers = list_buffers_at_peak(parse_module(HLO), allocations, {0: "batch.x"})
    expected = [
        (256, "f32[64]", "add", "forward", "Model/again"),  # in the place of `wide`
        (64, "f32[16]", "slice", "backward", "Model/late"),
        (32, "f32[8]", "slice", "", "out"),
        (32, "f32[8]", "parameter", "", "batch.x"),
        (32, "f32[8]", "slice", "backward", "Model/late"),  # on the chip
    ]
    found = [(row.bytes, row.shape, row.opcode, row.phase, row.scope) for row in buffers]
    assert sorted(found) == sorted(expected[: 4 if main_memory_only else 5])


def test_a_compiler_without_buffer_assignment_raises():
    class Lowered:
        def compile(self, compiler_options):
            return self

        def as_text(self):
            return HLO

    with pytest.raises(RuntimeError, match="the compiler for gpu wrote no buffer-assignment.txt"):
        read_buffers(Lowered(), {}, "gpu", {})
