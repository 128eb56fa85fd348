"""The selective scan: chunked equals recurrent and the equation, and saves boundary states alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.quick import mark_slow
from tests.recurrences import assert_shards_equal_one_device, draw_documents
from zoo.ops.recurrence import mamba

BATCH, INNER, STATE = 2, 3, 4
MODES = {"recurrent": mamba.recurrent_selective_scan, "chunked": mamba.chunked_selective_scan}


def case(seq, seed, *, segments=True, strength=1.0):
    """Draw x, dt, A, B, C, D, an initial state and segment ids (a single segment without `segments`)."""
    draw = np.random.default_rng(seed)
    ids = np.cumsum(draw.random((BATCH, seq)) < 0.15 * segments, axis=1)
    arrays = (
        draw.normal(size=(BATCH, seq, INNER)),
        draw.random((BATCH, seq, INNER)) * strength,
        -np.arange(1, STATE + 1) * np.ones((INNER, 1)),
        *draw.normal(size=(2, BATCH, seq, STATE)),
        draw.normal(size=INNER),
        draw.normal(size=(BATCH, INNER, STATE)),
    )
    return *(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(ids, jnp.int32)


@partial(jax.jit, static_argnums=0)
def with_gradients(mode, x, dt, A, B, C, D, state, ids):
    """Return output and last state, and the gradients of their sum with fixed weights."""

    def loss(*numbers):
        results = MODES[mode](*numbers[:6], state=numbers[6], segment_ids=ids)
        return sum((x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum() for x in results), results

    (_, results), gradients = jax.value_and_grad(loss, range(7), has_aux=True)(x, dt, A, B, C, D, state)
    return results, gradients


def close(ours, theirs, tolerance=5e-6):
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(other).max())))


@pytest.mark.parametrize("seq", mark_slow([1, 7, 16, 17, 33], but=[33]))
@settings(max_examples=6)
@given(
    seed=st.integers(0, 99),
    segments=st.booleans(),
    strength=st.sampled_from([0.1, 2, 20, 1e4]),
)
def test_chunked_selective_scan_equals_recurrent(seq, seed, segments, strength):
    numbers = case(seq, seed, segments=segments, strength=strength)
    ours, theirs = (with_gradients(mode, *numbers) for mode in ("chunked", "recurrent"))
    close(ours, theirs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ours))


@pytest.mark.parametrize("mode", MODES)
def test_selective_scan_equals_its_equation(mode):
    *numbers, state, ids = case(17, 1)
    x, dt, A, B, C, D = (np.asarray(x, np.float64) for x in numbers)
    output, last = mamba.selective_scan(*numbers, state=state, segment_ids=ids, implementation=mode)
    h = np.asarray(state, np.float64)
    for t in range(17):
        if t:
            h = np.where((ids[:, t] != ids[:, t - 1])[:, None, None], 0, h)
        h = np.exp(dt[:, t, :, None] * A) * h + (dt * x)[:, t, :, None] * B[:, t, None]
        np.testing.assert_allclose(output[:, t], (h * C[:, t, None]).sum(-1) + D * x[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last, h, rtol=1e-5, atol=1e-5)


def test_a_late_state_is_read_in_the_first_segment_only():
    """A shard of a sequence computes its outputs before it has the state, which earlier shards leave."""
    *numbers, state, _ = case(17, 3)
    ids = jnp.asarray([[1] * 6 + [2] * 11, [1] * 17], jnp.int32)
    run = jax.jit(lambda state: mamba.selective_scan(*numbers, state=state, segment_ids=ids))
    later = jax.jit(lambda state: mamba.selective_scan(*numbers, state=lambda _: state, segment_ids=ids))
    close(later(state), run(state))


@pytest.mark.slow  # test_selective_scan_equals_its_equation has segments and states by default
@pytest.mark.parametrize("mode", MODES)
def test_selective_scan_of_segments_and_states(mode):
    x, dt, A, B, C, D, _, _ = case(33, 2)
    run = jax.jit(lambda x, dt, B, C, ids, state: MODES[mode](x, dt, A, B, C, D, state=state, segment_ids=ids))
    part = lambda of, state=None: run(x[:, of], dt[:, of], B[:, of], C[:, of], None, state)
    first, between = part(slice(10))
    packed = run(x, dt, B, C, jnp.asarray([[0] * 10 + [1] * 23] * BATCH), None)
    second, end = part(slice(10, 33))
    close(packed, (jnp.concatenate([first, second], 1), end))
    second, end = part(slice(10, 33), between)
    close(part(slice(33)), (jnp.concatenate([first, second], 1), end))


def scan_on_shard(tokens, fixed, ids, state, fresh):
    (x, dt, B, C), (A, D) = tokens, fixed
    return mamba.selective_scan(x, dt, A, B, C, D, state=state, segment_ids=ids)


@pytest.mark.slow  # test_rg_lru.py has shards of a recurrence
@settings(max_examples=6)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.01, 2, 1e4]))
def test_selective_scan_of_shards_equals_one_device(seed, packed, strength):
    x, dt, A, B, C, D, _, _ = case(80, seed, strength=strength)
    ids = draw_documents(80, seed, packed=packed)
    assert_shards_equal_one_device(scan_on_shard, (x, dt, B, C), (A, D), ids)


@pytest.mark.parametrize("mode", mark_slow(MODES, but=["chunked"]))
def test_selective_scan_of_bfloat16_computes_in_float32(mode):
    x, dt, A, B, C, D, state, ids = case(17, 4)
    x, dt, B, C = (x.astype(jnp.bfloat16) for x in (x, dt, B, C))
    output, last = MODES[mode](x, dt, A, B, C, D, state=state, segment_ids=ids)
    x, dt, B, C = (x.astype(jnp.float32) for x in (x, dt, B, C))
    exact, end = mamba.recurrent_selective_scan(x, dt, A, B, C, D, state=state, segment_ids=ids)
    assert output.dtype == jnp.bfloat16 and last.dtype == jnp.float32
    np.testing.assert_allclose(output.astype(jnp.float32), exact, rtol=2**-8, atol=1e-5)
    close(last, end)


def test_chunked_selective_scan_saves_boundary_states_alone():
    row, rank = jax.ShapeDtypeStruct((1, 2048, 64), jnp.float32), jax.ShapeDtypeStruct((1, 2048, 16), jnp.float32)
    matrix, skip = jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    arguments, every = (row, row, matrix, rank, rank, skip), 2048 * 64 * 16
    kept = jax.eval_shape(lambda *a: jax.vjp(lambda *a: mamba.chunked_selective_scan(*a)[0], *a)[1], *arguments)
    assert max(leaf.size for leaf in jax.tree.leaves(kept)) == every // mamba.CHUNK_SIZE
    gradient = jax.jit(jax.grad(lambda *a: mamba.chunked_selective_scan(*a)[0].sum(), range(6)))
    memory: Any = gradient.lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * every  # what the states of all tokens would be


@pytest.mark.slow
def test_selective_scan_on_a_mesh_equals_one_device():
    x, dt, A, B, C, D, _, ids = case(17, 6)

    def loss(x, dt, A, B, C, D, ids):
        output, last = mamba.chunked_selective_scan(x, dt, A, B, C, D, segment_ids=ids)
        return jax.lax.psum((output**2).sum() + last.sum(), ("data", "tensor"))

    specs = (
        ("data", None, "tensor"),
        ("data", None, "tensor"),
        ("tensor",),
        ("data",),
        ("data",),
        ("tensor",),
        ("data",),
    )

    def gradients(data, tensor):
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((data, tensor), ("data", "tensor"), kinds, devices=jax.devices()[: data * tensor])
        specs_in = tuple(PartitionSpec(*spec) for spec in specs)
        split = jax.shard_map(loss, mesh=mesh, in_specs=specs_in, out_specs=PartitionSpec())
        return jax.jit(jax.value_and_grad(split, range(6)))(x, dt, A, B, C, D, ids)

    close(gradients(2, 3), gradients(1, 1), 1e-5)


def test_chunked_selective_scan_raises_for_chunk_size_zero():
    *numbers, _, _ = case(7, 0)
    with pytest.raises(ValueError, match="chunk_size is 0; a chunk has at least one token"):
        mamba.chunked_selective_scan(*numbers, chunk_size=0)
