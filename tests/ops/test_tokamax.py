"""Kernels of tokamax: equal to our references, over a mesh too, refused by name without the package, and compiled for
GPUs and TPUs."""

import importlib.util
import multiprocessing
import re
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import zoo
from tests.aot import compile_for, imagine
from zoo.ops.attention import ATTENTION, AttentionMask, attention
from zoo.ops.attention.request import AttentionRequest
from zoo.ops.implementations import ObstacleError
from zoo.ops.moe.grouped_matmul import grouped_matmul, grouped_matmul_implementation
from zoo.ops.platform import target_device, target_platform
from zoo.ops.recurrence.delta_rule import delta_rule, gated_delta_rule, kda
from zoo.ops.tokamax import UNMEASURED

SEQ = 16
SHAPES = (2, SEQ, 4, 8), (2, SEQ, 2, 8), (2, SEQ, 2, 4)
"""Queries, keys and values of two rows, with two query heads per key head."""


def draw(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def list_masks():
    """List masks of every kind, each with a soft cap or None."""
    ids = jnp.repeat(jnp.array([[1, 2, 3, 3], [1, 1, 1, 2]]), SEQ // 4, axis=1)
    segments: dict[str, Any] = {"query_segments": ids, "key_segments": ids}
    place = jnp.broadcast_to(jnp.maximum(jnp.arange(SEQ) - 3, -1), (2, SEQ))  # the first three tokens are padding
    positions: dict[str, Any] = {"query_positions": place, "key_positions": place}
    selected = jax.random.bernoulli(jax.random.key(1), 0.3, (2, SEQ, SEQ))  # some queries have no keys
    return [
        (AttentionMask(causal=True), None),
        (AttentionMask(causal=True, window=5), 3.0),
        (AttentionMask(causal=False, window=5, **segments), None),
        (AttentionMask(causal=True, **positions), None),
        (AttentionMask(causal=True, selected=selected), None),
    ]


def attend_all(implementation, query, key, value):
    return [
        attention(query, key, value, mask, soft_cap=soft_cap, scale=0.3, implementation=implementation)
        for mask, soft_cap in list_masks()
    ]


def multiply(implementation, x, weight, sizes):
    with grouped_matmul_implementation(implementation):
        return grouped_matmul(x, weight, sizes)


def correct(implementation, query, key, value, beta, gate, state):
    """Apply KDA, the gated delta rule and the delta rule, with bounded decays."""
    unit = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    operands = query, unit, value, 2 * jax.nn.sigmoid(beta)
    decay = -5 * jax.nn.sigmoid(3 * gate)
    return [
        kda(*operands, decay, state=state, implementation=implementation),
        gated_delta_rule(*operands, decay[..., 0], implementation=implementation),
        delta_rule(*operands, implementation=implementation),
    ]


def with_gradients(run, *operands):
    """Return the outputs of `run`, and the gradients of a function of them."""

    def loss(*operands):
        outputs = run(*operands)
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(outputs)), outputs

    argnums = tuple(n for n, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    return jax.jit(jax.grad(loss, argnums=argnums, has_aux=True))(*operands)


def assert_equal(ours, theirs, tolerance=1e-5):
    """Compare trees of arrays, with errors relative to the largest value of an array."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * abs(b).max(), rtol=0), ours, theirs)


@pytest.mark.neighbors("tokamax")
def test_attention_equals_the_reference():
    operands = draw(*SHAPES)
    ours, theirs = (with_gradients(partial(attend_all, name), *operands) for name in ("tokamax", "reference"))
    assert_equal(ours, theirs)


@pytest.mark.neighbors("tokamax")
def test_grouped_products_equal_the_reference():
    x, weight = draw((40, 16), (4, 24, 16))
    operands = x, weight, jnp.array([10, 0, 20, 5])  # an expert without rows, and rows without an expert
    ours, theirs = (with_gradients(partial(multiply, name), *operands) for name in ("tokamax", "reference"))
    assert_equal(ours, theirs)


@pytest.mark.neighbors("tokamax")
@pytest.mark.ci
def test_delta_rules_equal_the_reference():
    operands = draw(*[(1, 5, 2, 8)] * 3, (1, 5, 2), (1, 5, 2, 8), (1, 2, 8, 8))
    ours, theirs = (with_gradients(partial(correct, name), *operands) for name in ("tokamax", "recurrent"))
    assert_equal(ours, theirs)


@pytest.mark.neighbors("tokamax")
def test_a_decay_that_the_kernels_cannot_exponentiate_gives_nan():
    query, key, value, beta = draw(*[(1, 3, 2, 8)] * 3, (1, 3, 2))
    decay = jnp.full((1, 3, 2), -1.0).at[0, 1, 1].set(-5.1)
    output, state = jax.jit(partial(gated_delta_rule, implementation="tokamax"))(query, key, value, beta, decay)
    assert jnp.isfinite(output[:, :, 0]).all() and jnp.isfinite(state[:, 0]).all()
    assert jnp.isnan(output[:, :, 1]).all() and jnp.isnan(state[:, 1]).all()


@pytest.mark.neighbors("tokamax")
def test_kernels_differentiate_in_a_scan_over_a_mesh():
    query, key, value, x, weight = draw(*SHAPES[:2], SHAPES[1], (2, 6, 8), (3, 8, 8))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def loss(names, query, key, value, x, weight):
        def layer(carry, _):
            query, x = carry
            query = query + attention(query, key, value, AttentionMask(causal=True), implementation=names[0])
            return (query, x + multiply(names[1], x[0], weight, jnp.array([2, 1, 3]))[None]), None

        query, x = jax.lax.scan(layer, (query, x), None, length=2)[0]
        return jax.lax.psum(jnp.sin(query).sum() + jnp.sin(x).sum(), "data")

    def differentiate(*names):
        run = jax.grad(partial(loss, names), argnums=(0, 1, 2, 3, 4))
        specs = rows, rows, rows, rows, whole
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs))(query, key, value, x, weight)

    assert_equal(differentiate("tokamax", "tokamax"), differentiate("reference", "reference"))


@pytest.mark.neighbors("tokamax")
def test_other_derivatives_are_refused_by_name():
    query, key, value = draw(*SHAPES)
    attend = lambda query: attention(query, key, value, AttentionMask(causal=True), implementation="tokamax").sum()
    with pytest.raises(TypeError, match='tokamax.s attention has no forward-mode derivative: set attention="grouped"'):
        jax.jvp(attend, (query,), (query,))
    with pytest.raises(TypeError, match="tokamax.s attention has no second derivative"):
        jax.jvp(jax.grad(attend), (query,), (query,))


def test_without_the_package_the_refusal_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokamax" else find_spec(name))
    message = r"'equizoo\[tokamax\]', with Python 3.12 and jax 0.11.1 or newer"
    query, key, value = draw(*SHAPES)
    with pytest.raises(ObstacleError, match=message):
        attention(query, key, value, AttentionMask(causal=True), implementation="tokamax")
    with pytest.raises(ObstacleError, match=message):
        multiply("tokamax", query[0, 0], jnp.zeros((2, 8, 8)), jnp.array([2, 2]))
    with pytest.raises(ObstacleError, match=message):
        delta_rule(query, query, query, query[..., 0], implementation="tokamax")


def test_tokamax_says_what_it_cannot_compute(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    query, key, value = draw(*SHAPES)
    tokamax = next(each for each in ATTENTION.implementations if each.name == "tokamax")

    def explain(query=query, sinks=None):
        mask = AttentionMask(causal=True)
        return tokamax.find_obstacle(AttentionRequest.from_arrays(query, key, value, mask, None, sinks))

    assert explain() is None and tokamax.find_drawback(None) == UNMEASURED
    assert "sinks" in str(explain(sinks=jnp.zeros(4)))
    assert "several dtypes" in str(explain(query.astype(jnp.bfloat16)))
    with target_platform("tpu"):
        assert "model of the TPU" in str(explain())
        with target_device("a TPU"):
            assert "multiples of 128" in str(explain())
    with target_platform("gpu"), target_device("a GPU"):
        assert "in bfloat16 or float16 on GPUs, not in float32" in str(explain())
    ids = jnp.zeros((2, SEQ), int)
    with pytest.raises(ObstacleError, match="rows are packed, and it keeps one state per segment"):
        delta_rule(query, query, query, query[..., 0], segment_ids=ids, implementation="tokamax")


def differentiate_attention(query, key, value, ids):
    """Return the gradient of attention with a window, a soft cap and segments, and of causal attention."""

    def loss(query, key, value):
        packed = AttentionMask(causal=True, window=64, query_segments=ids, key_segments=ids)
        outputs = [
            attention(query, key, value, packed, soft_cap=30.0, implementation="tokamax"),
            attention(query, key, value, AttentionMask(causal=True), implementation="tokamax"),
            attention(query, key, value, AttentionMask(causal=True, window=64), implementation="tokamax"),
        ]
        return sum(x.astype(jnp.float32).sum() for x in outputs)

    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)


def sum_grouped(x, weight, sizes):
    return multiply("tokamax", x, weight, sizes).astype(jnp.float32).sum()


ATTENDED = (
    *(jax.ShapeDtypeStruct((2, 512, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)),
    jax.ShapeDtypeStruct((2, 512), jnp.int32),
)
GROUPED = (
    *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (4, 384, 256))),
    jax.ShapeDtypeStruct((4,), jnp.int32),
)


def find_kernels(program):
    return set(re.findall(r'custom_call_target="(mosaic_gpu|tpu_custom_call)', program.text))


@pytest.mark.neighbors("tokamax")
@pytest.mark.aot
@pytest.mark.parametrize(("topology", "kernel"), [("h100:1", "mosaic_gpu"), ("v5p:2x2x1", "tpu_custom_call")])
def test_attention_and_grouped_products_compile(topology, kernel):
    assert find_kernels(compile_for(topology, differentiate_attention, *ATTENDED)) == {kernel}
    gradient = jax.grad(sum_grouped, argnums=(0, 1))
    assert find_kernels(compile_for(topology, gradient, *GROUPED)) == {kernel}


@pytest.mark.neighbors("tokamax")
@pytest.mark.aot
def test_attention_and_grouped_products_compile_for_blackwell():
    """In a process of its own: Pallas compiles for the kind of GPU that it has met first."""
    run = multiprocessing.get_context("spawn").Process(target=compile_for_blackwell)
    imagine("b200:1")
    run.start()
    run.join()
    assert run.exitcode == 0


def compile_for_blackwell():
    assert find_kernels(compile_for("b200:1", differentiate_attention, *ATTENDED)) == {"mosaic_gpu"}
    assert find_kernels(compile_for("b200:1", sum_grouped, *GROUPED)) == {"mosaic_gpu"}
    with pytest.raises(ObstacleError, match='says .*dimension_numbers.* set grouped_matmul="padded"'):
        compile_for("b200:1", jax.grad(sum_grouped, argnums=(0, 1)), *GROUPED)


@pytest.mark.neighbors("tokamax")
@pytest.mark.aot
def test_delta_rules_compile():
    def loss(query, key, value, beta, decay):
        return kda(query, key, value, beta, decay, implementation="tokamax")[0].astype(jnp.float32).sum()

    heads = jax.ShapeDtypeStruct((2, 200, 2, 128), jnp.bfloat16)
    beta = jax.ShapeDtypeStruct((2, 200, 2), jnp.bfloat16)
    gradient = jax.grad(loss, argnums=range(5))
    program = compile_for("v6e:1x1", gradient, heads, heads, heads, beta, heads)
    assert find_kernels(program) == {"tpu_custom_call"}
    with pytest.raises(ObstacleError, match="its kernels are for TPUs from v6e on, not for a TPU v5"):
        compile_for("v5p:2x2x1", gradient, heads, heads, heads, beta, heads)


@pytest.mark.neighbors("tokamax")
@pytest.mark.aot
@pytest.mark.parametrize("topology", ["h100:2", "v6e:2x1"])
def test_a_model_compiles_and_reports_its_kernels(topology):
    """With heads and experts' rows sharded, and parameters that are gathered."""

    def make(key):
        model = zoo.models.MixtureOfExperts(vocab=256, embed=256, layers=1, heads=4, mlp=256, experts=4, top=2, key=key)
        return zoo.cast(zoo.set_implementations(model, attention="tokamax", grouped_matmul="tokamax"), jnp.bfloat16)

    mesh = zoo.make_mesh(tensor=2, devices=imagine(topology))
    model = zoo.place(eqx.filter_eval_shape(make, jax.random.key(0)), mesh)
    tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    batch = zoo.place_batch({"tokens": tokens, "targets": tokens}, mesh)
    program = zoo.inspect.compiled(zoo.value_and_grad(zoo.cross_entropy, mesh), model, batch)
    assert find_kernels(program) and program.compiled_flops is None
    table = zoo.inspect.implementations(model, mesh=mesh, batch=2, seq_len=256)
    chosen = {row.operation: row.chosen for row in table.rows}
    assert chosen["attention"] == chosen["grouped matmul"] == "tokamax"
    if topology.startswith("h100"):  # kernels for TPUs say their FLOPs
        assert any("flash_attention_sm90" in kernel for kernel in program.flops.uncounted)


@pytest.mark.neighbors("tokamax")
@pytest.mark.aot
@pytest.mark.slow
def test_tpu_kernels_equal_the_reference_in_the_interpreter():
    from jax.experimental.pallas import tpu as pltpu

    operands = draw(*[(1, 100, 2, 16)] * 3, (1, 100, 2), (1, 100, 2, 16), (1, 2, 16, 16))
    grouped = *draw((256, 128), (4, 128, 128)), jnp.array([40, 0, 100, 60])
    theirs = with_gradients(partial(correct, "recurrent"), *operands)
    other = with_gradients(partial(multiply, "reference"), *grouped)
    device = imagine("v6e:1x1")[0]
    with pltpu.force_tpu_interpret_mode(), target_platform("tpu"), target_device(device):
        assert_equal(with_gradients(partial(multiply, "tokamax"), *grouped), other, 1e-4)
        assert_equal(with_gradients(partial(correct, "tokamax"), *operands), theirs, 1e-4)
