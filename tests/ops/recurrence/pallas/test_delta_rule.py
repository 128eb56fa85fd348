"""The kernels of the delta rules, interpreted: equal to the recurrent form in values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zoo
from tests.aot import compile_for, imagine
from tests.recurrences import BATCH, HEADS, KEY_DIM, VALUE_DIM, all_close, draw_delta
from zoo.ops.platform import target_platform
from zoo.ops.recurrence.delta_rule import delta_rule, gated_delta_product, gated_delta_rule, kda
from zoo.ops.recurrence.generalized_delta import recurrent_delta
from zoo.ops.recurrence.pallas._delta_rule_kernels import invert_unit_lower
from zoo.ops.recurrence.pallas.delta_rule import find_delta_rule_obstacle, pallas_delta_rule
from zoo.ops.recurrence.select import RecurrenceRequest

CASES = [(7, "none", 1), (33, "number", 1), (17, "number", 2)]
"""Tokens, decays, steps: one chunk of 16 rows, three, and three of two rows per token; the last is partial."""


def draw(case, seed=0, strength=1.0, dtype=jnp.float32):
    seq, decays, steps = case
    inputs = draw_delta(seq, decays, steps, seed, strength, dtype)
    inputs["beta"] = jnp.minimum(jnp.abs(inputs["value"][..., 0]), 2)
    return {name: x for name, x in inputs.items() if not name.startswith(("read", "write"))}


def draw_segments(seq, often, seed):
    """Segment ids that change at a token with this probability."""
    return jnp.asarray((np.random.default_rng(seed).random((BATCH, seq)) < often).cumsum(1))


def draw_cotangents(seq, seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed))
    output = jax.random.normal(keys[0], (BATCH, seq, HEADS, VALUE_DIM), dtype)
    return output, jax.random.normal(keys[1], (BATCH, HEADS, KEY_DIM, VALUE_DIM))


def apply_recurrent(query, key, value, beta, log_decay=None, **options):
    steps, rate = key.shape[1] // query.shape[1], beta[..., None]
    return recurrent_delta(
        query, -rate * key, key, rate * value, log_decay=log_decay, steps=steps, scale=KEY_DIM**-0.5, **options
    )


small_chunks = partial(pallas_delta_rule, chunk_size=16)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(op, inputs, segment_ids, cotangents):
    outputs, back = jax.vjp(lambda inputs: op(**inputs, segment_ids=segment_ids), inputs)
    return outputs, back(cotangents)[0]


@pytest.mark.one_case
@pytest.mark.parametrize("case", [pytest.param(CASES[0], marks=pytest.mark.slow), *CASES[1:]])
@settings(max_examples=3)
@given(
    often=st.sampled_from([0.0, 0.1, 0.6]),
    strength=st.sampled_from([0.1, 20.0, 2000.0]),
    seed=st.integers(0, 99),
)
@example(often=0.1, strength=1.0, seed=0)
def test_pallas_delta_rule_equals_recurrent_with_gradients(case, often, strength, seed):
    inputs, segment_ids = draw(case, seed, strength), draw_segments(case[0], often, seed)
    cotangents = draw_cotangents(case[0], seed)
    found = value_and_gradients(small_chunks, inputs, segment_ids, cotangents)
    expected = value_and_gradients(apply_recurrent, inputs, segment_ids, cotangents)
    all_close(found, expected, 5e-6)


@pytest.mark.slow
def test_pallas_delta_rule_of_bfloat16():
    """Bound: operands are rounded to 2^-9 several times between input and output, and errors of rows propagate."""
    inputs, cotangents = draw(CASES[1], seed=3, dtype=jnp.bfloat16), draw_cotangents(33, 3, jnp.bfloat16)
    outputs, gradients = value_and_gradients(small_chunks, inputs, None, cotangents)
    fp32 = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs, None, cotangents))
    all_close((outputs, gradients), value_and_gradients(apply_recurrent, *fp32), 2**-6)
    assert [x.dtype for x in outputs] == [jnp.bfloat16, jnp.float32]
    assert {name: x.dtype for name, x in gradients.items()} == {name: x.dtype for name, x in inputs.items()}


def test_invert_unit_lower_of_an_ill_conditioned_system():
    """Keys within 3 degrees and beta near 2: all sums cancel, and powers of the triangle reach 1e27."""
    keys = 1 + 0.05 * np.random.default_rng(0).normal(size=(64, 16)) / 4
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    lower = np.tril(-1.99 * keys @ keys.T, -1).astype(np.float32)
    expected = np.linalg.inv(np.eye(64) - lower.astype(np.float64))
    for refine, bound in ((True, 5e-6), (False, 1e-4)):
        all_close(jax.jit(partial(invert_unit_lower, refine=refine))(jnp.asarray(lower)), expected, bound)


def test_delta_rules_take_pallas_by_name():
    one, two = draw((7, "number", 1)), draw((7, "number", 2))
    ungated = {name: x for name, x in one.items() if name != "log_decay"}
    for op, inputs in ((delta_rule, ungated), (gated_delta_rule, one), (gated_delta_product, two)):
        found, expected = (jax.jit(partial(op, implementation=name))(**inputs) for name in ("pallas", "recurrent"))
        all_close(found, expected, 5e-6)
    with pytest.raises(ValueError, match="'pallas' cannot compute this, because it takes one decay per head"):
        kda(**draw((7, "vector", 1)), implementation="pallas")


REQUEST = RecurrenceRequest(batch=1, seq=512, dtype=jnp.bfloat16, key_dim=128, value_dim=128, decay="head")
REFUSED = {
    "channel decays": ({"decay": "channel"}, {}, "one decay per head"),
    "float16": ({"dtype": jnp.float16}, {}, "float32 or bfloat16, not float16"),
    "a wide state": ({"key_dim": 1024, "value_dim": 1024}, {}, "takes 40.0 MiB of VMEM"),
    "a short chunk": ({}, {"chunk_size": 8}, "chunk_size is 8"),
    "a chunk of 48": ({}, {"chunk_size": 48}, "chunk_size is 48"),
}


@pytest.mark.parametrize(("change", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_find_delta_rule_obstacle_names_the_reason(change, options, reason):
    assert find_delta_rule_obstacle(REQUEST) is None
    assert reason in find_delta_rule_obstacle(RecurrenceRequest(**(vars(REQUEST) | change)), **options)


def test_find_delta_rule_obstacle_by_platform():
    with target_platform("tpu"):
        assert find_delta_rule_obstacle(REQUEST) is None
    with target_platform("gpu"):
        assert find_delta_rule_obstacle(REQUEST) == "it runs on CPU and TPU, and this is compiled for GPU"


ROWS = ("key", "value", "beta")


def test_pallas_delta_rule_raises_for_what_it_cannot_compute():
    inputs = draw((4, "vector", 1))
    with pytest.raises(ValueError, match="cannot compute this, because it takes one decay per head"):
        pallas_delta_rule(**inputs)
    rows = {name: jnp.pad(inputs[name], [(0, 0), (0, 1)] + [(0, 0)] * (inputs[name].ndim - 2)) for name in ROWS}
    with pytest.raises(ValueError, match="5 rows of keys are not a multiple of 4 tokens"):
        pallas_delta_rule(**inputs | rows)


def test_pallas_delta_rule_is_refused_on_a_mesh_of_cpus():
    mesh = zoo.make_mesh(data=2, devices=jax.devices()[:2])
    inputs = zoo.place(draw((4, "number", 1)), mesh)
    run = zoo.spmd(lambda inputs: pallas_delta_rule(**inputs)[0], mesh, out="batch seq heads value_dim")
    with pytest.raises(ValueError, match="Pallas' interpreter, which runs it on a CPU, does not run on a mesh"):
        run(inputs)


def describe_inputs(seq, key_dim, value_dim, dtype):
    """Shapes of the operands, with segments, and of both cotangents."""
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct((2, *dims), dtype)
    rows = {name: shape(seq, 4, key_dim, dtype=dtype) for name in ("query", "key")}
    rows |= {"value": shape(seq, 4, value_dim, dtype=dtype), "beta": shape(seq, 4), "log_decay": shape(seq, 4)}
    inputs = rows | {"state": shape(4, key_dim, value_dim)}
    return inputs, shape(seq, dtype=jnp.int32), (rows["value"], inputs["state"])


def apply_with_gradients(inputs, segment_ids, cotangents):
    outputs, back = jax.vjp(lambda inputs: pallas_delta_rule(**inputs, segment_ids=segment_ids), inputs)
    return outputs, back(cotangents)[0]


KERNEL_CALL = 'custom_call_target="tpu_custom_call"'


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 128), (128, 128)])
def test_pallas_delta_rule_compiles_for_tpu(key_dim, value_dim, dtype):
    inputs = describe_inputs(500, key_dim, value_dim, dtype)
    program = compile_for("v5e:2x4", apply_with_gradients, *inputs)
    assert program.text.count(KERNEL_CALL) == 2
    states_per_chunk = 2 * 4 * 8 * key_dim * 128 * 4
    assert program.memory.peak < program.memory.arguments + program.memory.outputs + 10 * states_per_chunk


@pytest.mark.aot
def test_pallas_delta_rule_compiles_on_a_mesh_of_tpus():
    mesh = zoo.make_mesh(data=2, devices=imagine("v5e:2x2")[:2])
    inputs, segment_ids, cotangents = zoo.place_batch(describe_inputs(100, 64, 64, jnp.bfloat16), mesh)
    out = (("batch seq heads value_dim", "batch heads key_dim value_dim"), dict.fromkeys(inputs, "batch"))
    run = zoo.spmd(apply_with_gradients, mesh, out=out)
    program = compile_for("v5e:2x2", run, inputs, segment_ids, cotangents)
    assert program.text.count(KERNEL_CALL) == 2 and not program.collectives
