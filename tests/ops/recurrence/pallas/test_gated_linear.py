"""The kernels of gated linear attention: equal to the recurrent form in values and gradients, and compiled for v5e."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zoo
from tests.aot import compile_for, imagine
from tests.quick import mark_slow
from tests.recurrences import BATCH, KEY_DIM, all_close, draw_gated
from zoo.ops.platform import target_platform
from zoo.ops.recurrence.gated_linear import recurrent_gated_linear
from zoo.ops.recurrence.mlstm import mlstm
from zoo.ops.recurrence.pallas.gated_linear import find_gated_linear_obstacle, pallas_gated_linear
from zoo.ops.recurrence.select import RecurrenceRequest

CASES = {
    "none": ("none", 2, 2, False),
    "shared keys": ("number", 4, 2, False),
    "vector": ("vector", 2, 2, False),
    "vector and bonus": ("vector", 2, 2, True),
    "number and bonus": ("number", 2, 2, True),
}
"""Log decays, heads of values, heads of keys, and a bonus."""
SEQ = 37
"""Three chunks of 16 tokens, the last of them partial."""


def draw(case, seed=0, strength=1.0, often=0.0, dtype=jnp.float32):
    """Operands with a state and segments that change at a token with a probability; cotangents."""
    kind, heads, groups, has_bonus = CASES[case]
    numbers = np.random.default_rng(seed)
    names = ("query", "key", "value", "log_decay", "state")
    operands = dict(zip(names, draw_gated(SEQ, kind, heads, groups, seed, strength), strict=True))
    operands |= {name: operands[name].astype(dtype) for name in names[:3]}
    operands["bonus"] = jnp.asarray(numbers.normal(size=(heads, KEY_DIM)), jnp.float32) if has_bonus else None
    segment_ids = jnp.asarray((numbers.random((BATCH, SEQ)) < often).cumsum(1))
    other = draw_gated(SEQ, kind, heads, groups, seed + 1)
    return operands, segment_ids, (other[2].astype(dtype), other[4])


@partial(jax.jit, static_argnums=0)
def value_and_gradients(op, operands, segment_ids, cotangents):
    run = lambda operands: op(**operands, scale=0.5, segment_ids=segment_ids)
    outputs, back = jax.vjp(run, operands)
    return outputs, back(cotangents)[0]


small_chunks = partial(pallas_gated_linear, chunk_size=16)


@pytest.mark.one_case
@pytest.mark.parametrize("case", mark_slow(CASES, but=("shared keys", "vector and bonus")))
@settings(max_examples=3)
@given(
    strength=st.sampled_from([0.1, 20.0, 1e4]),
    often=st.sampled_from([0.0, 0.1, 0.6]),
    seed=st.integers(0, 99),
)
@example(strength=1.0, often=0.1, seed=0)
def test_pallas_gated_linear_equals_recurrent_with_gradients(case, strength, often, seed):
    operands = draw(case, seed, strength, often)
    found = value_and_gradients(small_chunks, *operands)
    all_close(found, value_and_gradients(recurrent_gated_linear, *operands), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["shared keys", "vector"])
def test_pallas_gated_linear_of_bfloat16(case):
    """Bound: operands are rounded to 2^-9 several times between input and output."""
    operands, segment_ids, cotangents = draw(case, often=0.1, dtype=jnp.bfloat16)
    outputs, gradients = value_and_gradients(small_chunks, operands, segment_ids, cotangents)
    operands32, cotangents32 = jax.tree.map(lambda x: x.astype(jnp.float32), (operands, cotangents))
    exact = value_and_gradients(recurrent_gated_linear, operands32, segment_ids, cotangents32)
    all_close((outputs, gradients), exact, 2**-6)
    assert [x.dtype for x in outputs] == [jnp.bfloat16, jnp.float32]
    assert [x.dtype for x in jax.tree.leaves(gradients)] == [x.dtype for x in jax.tree.leaves(operands)]


def test_pallas_gated_linear_splits_many_shared_heads(monkeypatch):
    """Six heads that share keys, in blocks of three: the sums over blocks are outside of the kernel."""
    query, key, value, decay, state = draw_gated(20, "number", heads=6, groups=1)
    operands = {"query": query, "key": key, "value": value, "log_decay": decay, "state": state}
    monkeypatch.setattr(f"{pallas_gated_linear.__module__}._STATE_BYTES", 4 * 4 * KEY_DIM * value.shape[3])
    found = value_and_gradients(small_chunks, operands, None, (value, state))
    all_close(found, value_and_gradients(recurrent_gated_linear, operands, None, (value, state)), 1e-6)


def test_mlstm_takes_pallas_by_name():
    """Its values have a column for the normalizer."""
    query, key, value, gates, _ = draw_gated(20, "vector")
    run = lambda name: mlstm(query, key, value, gates[..., 0], gates[..., 1], implementation=name)
    found, expected = jax.jit(lambda: (run("pallas"), run("recurrent")))()
    all_close(found, expected, 1e-5)


REQUEST = RecurrenceRequest(batch=1, seq=512, dtype=jnp.bfloat16, heads=4, groups=4, key_dim=128, value_dim=128)
REFUSED = {
    "shared channel decays": (
        {"decay": "channel", "groups": 2},
        {},
        "4 heads of values share 2 heads of keys",
    ),
    "a shared bonus": ({"has_bonus": True, "groups": 1}, {}, "share 1 heads of keys, with a bonus"),
    "float16": ({"dtype": jnp.float16}, {}, "float32 or bfloat16, not float16"),
    "a wide state": ({"key_dim": 1024, "value_dim": 1024}, {}, "MiB of a core's memory, and a kernel has 16"),
    "a short chunk": ({}, {"chunk_size": 8}, "chunk_size is 8"),
    "a chunk of 48": ({}, {"chunk_size": 48}, "chunk_size is 48"),
}


@pytest.mark.parametrize(("change", "options", "reason"), REFUSED.values(), ids=REFUSED)
def test_find_gated_linear_obstacle_names_the_reason(change, options, reason):
    assert find_gated_linear_obstacle(REQUEST) is None
    assert reason in find_gated_linear_obstacle(RecurrenceRequest(**(vars(REQUEST) | change)), **options)


def test_find_gated_linear_obstacle_by_platform():
    with target_platform("tpu"):
        assert find_gated_linear_obstacle(REQUEST) is None
    with target_platform("gpu"):
        assert find_gated_linear_obstacle(REQUEST) == "it runs on CPU and TPU, and this is compiled for GPU"


def test_pallas_gated_linear_raises_for_what_it_cannot_compute():
    query, key, value, decay, _ = draw_gated(3, "vector", heads=4, groups=2)
    with pytest.raises(ValueError, match="cannot compute this, because 4 heads of values share 2 heads of keys"):
        pallas_gated_linear(query, key, value, decay)
    with pytest.raises(ValueError, match="3 heads of values do not divide evenly over 2 heads"):
        pallas_gated_linear(query, key, value[:, :, :3])


def test_pallas_gated_linear_on_a_mesh_of_one_cpu():
    """Pallas' interpreter refuses several: a kernel's constants do not vary over the mesh as its operands do."""
    operands = draw_gated(3, "number")[:4]
    apply = lambda *operands: pallas_gated_linear(*operands)[0]
    run = lambda devices: zoo.spmd(
        apply, zoo.make_mesh(data=devices, devices=jax.devices()[:devices]), out="batch seq heads value_dim"
    )(*operands)
    all_close(run(1), recurrent_gated_linear(*operands)[0], 1e-6)
    with pytest.raises(ValueError, match="Pallas' interpreter, which runs it on a CPU, does not run on a mesh"):
        run(2)


def describe(dtype, decay, *, heads=4, groups=4, key_dim=128, value_dim=128, rows=2):
    """Shapes of query, key, value, log decay, segment ids and state, 512 tokens."""
    shape = lambda *dims, dtype=dtype: jax.ShapeDtypeStruct((rows, *dims), dtype)
    keys, channels = shape(512, groups, key_dim), (key_dim,) if decay == "channel" else ()
    log_decay = shape(512, heads, *channels, dtype=jnp.float32)
    state = shape(heads, key_dim, value_dim, dtype=jnp.float32)
    return keys, keys, shape(512, heads, value_dim), log_decay, shape(512, dtype=jnp.int32), state


def run_backward(query, key, value, log_decay, segment_ids, state, bonus=None):
    def run(query, key, value, log_decay, state, bonus):
        return pallas_gated_linear(query, key, value, log_decay, bonus=bonus, state=state, segment_ids=segment_ids)

    outputs, back = jax.vjp(run, query, key, value, log_decay, state, bonus)
    return outputs, back(jax.tree.map(jnp.cos, outputs))


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_pallas_gated_linear_compiles_for_v5e(dtype, decay):
    shapes = describe(dtype, decay)
    bonus = [jax.ShapeDtypeStruct((4, 128), jnp.float32)] if decay == "channel" else []
    program = compile_for("v5e:2x4", run_backward, *shapes, *bonus)
    assert program.text.count('custom_call_target="tpu_custom_call"') == 2
    assert "dot(" not in program.text and "while(" not in program.text


@pytest.mark.aot
def test_pallas_gated_linear_of_odd_dims_compiles_for_v5e():
    """mLSTM's value has a column for the normalizer, and Mamba-2's heads share one key."""
    shapes = describe(jnp.bfloat16, "head", heads=6, groups=1, key_dim=24, value_dim=65)
    program = compile_for("v5e:2x4", run_backward, *shapes)
    assert program.text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.aot
def test_pallas_gated_linear_compiles_for_a_mesh_of_v5e():
    mesh = zoo.make_mesh(data=2, devices=imagine("v5e:2x2")[:2])
    operands = zoo.place_batch(dict(enumerate(describe(jnp.bfloat16, "head")[:5])), mesh)
    dims = "batch seq heads value_dim"

    def run(operands):
        query, key, value, log_decay, segment_ids = operands.values()
        outputs, gradients = run_backward(query, key, value, log_decay, segment_ids, None)
        return outputs[0], gradients[2]

    program = compile_for("v5e:2x2", zoo.spmd(run, mesh, out=(dims, dims)), operands)
    assert program.text.count('custom_call_target="tpu_custom_call"') == 2 and not program.collectives
