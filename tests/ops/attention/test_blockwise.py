"""Blockwise attention: equal to the reference, a log-sum-exp with a gradient, and costs linear in length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from tests.quick import mark_slow
from zoo.layers import MLP, Attention, Dropout, Embedding, RMSNorm
from zoo.layers.token_info import count_lookahead, pack_positions
from zoo.models import Block, Decoder, Stack
from zoo.ops.attention import ATTENTION, AttentionMask, blockwise_attention, reference_attention
from zoo.ops.attention.blockwise import blockwise_attention_with_lse, choose_block
from zoo.ops.attention.grouped import grouped_query_attention_with_lse
from zoo.ops.attention.request import AttentionRequest
from zoo.ops.platform import target_platform

BATCH, HEADS, DIM, BLOCK = 2, 4, 8, 16
SINKS = jnp.array([-1.0, 0.0, 0.5, 2.0])


def inputs(seq, key_seq=None, kv_heads=2, value_dim=DIM, dtype=jnp.float32, seed=0):
    """Draw query, key, value and a cotangent."""
    key_seq = key_seq or seq
    shapes = (seq, HEADS, DIM), (key_seq, kv_heads, DIM), (key_seq, kv_heads, value_dim), (seq, HEADS, value_dim)
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, (BATCH, *shape)).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


@partial(jax.jit, static_argnames=("attend", "options", "mask", "platform"))
def value_and_gradients(attend, arrays, cotangent, marks, *, mask, options, platform="cpu"):
    """Return the output, and the gradients of all arrays: query, key, value and, if given, sinks."""

    def call(query, key, value, sinks=None):
        mask_of_call = AttentionMask(**dict(mask), **marks)
        return attend(query, key, value, mask_of_call, sinks=sinks, **dict(options))

    with target_platform(platform):
        output, back = jax.vjp(call, *arrays)
        return output, *back(cotangent)


CASES = {  # one compilation each: shapes, the mask, options, marks
    "causal": (dict(seq=50), dict(causal=True), {}, ""),
    "one key head, a window, narrow values": (
        dict(seq=50, kv_heads=1, value_dim=5),
        dict(causal=True, window=20),
        {},
        "segments",
    ),
    "wide values and a cap": (dict(seq=50, kv_heads=4, value_dim=11), dict(causal=False), dict(soft_cap=1.5), ""),
    "bidirectional in a window": (dict(seq=50), dict(causal=False, window=9), dict(scale=0.9), "segments"),
    "block-causal in a window": (dict(seq=50), dict(causal=True, window=20, block=11), {}, "segments"),
    "block-causal, cached": (dict(seq=20, key_seq=70), dict(causal=True, block=6), {}, "positions"),
    "looking ahead in a window": (dict(seq=50), dict(causal=True, window=20), {}, "lookahead"),
    "half precision": (dict(seq=50, dtype=jnp.bfloat16), dict(causal=True), dict(soft_cap=1.5), ""),
    "cross-attention": (dict(seq=20, key_seq=70), dict(causal=False), {}, ""),
    "cached": (dict(seq=20, key_seq=70), dict(causal=True), dict(soft_cap=1.5), "positions"),
    "cached, a window": (dict(seq=3, key_seq=70), dict(causal=True, window=30), {}, "positions"),
}


def draw_marks(kind, seq, key_seq, seed):
    """Draw sorted segments, or positions as in a ring buffer with empty slots."""
    rng = np.random.default_rng(seed)
    if kind == "segments":
        ids = jnp.array(np.sort(rng.integers(0, 1 + seed % 5, (BATCH, seq))))
        return dict(query_segments=ids, key_segments=ids)
    if kind == "positions":
        held = [np.roll(np.arange(-5 * row, key_seq - 5 * row), seed) for row in range(BATCH)]
        now = rng.integers(-1, key_seq, (BATCH, seq))
        return dict(query_positions=jnp.array(now), key_positions=jnp.maximum(jnp.array(held), -1))
    if kind == "lookahead":  # spans, which windows may cut
        starts = jnp.array(np.sort(rng.integers(0, seq, (BATCH, 4))))
        places = jnp.broadcast_to(jnp.arange(seq), (BATCH, seq))
        spans = (places[..., None] >= starts[:, None]).sum(-1)
        ids = jnp.array(np.sort(rng.integers(0, 2, (BATCH, seq))))
        marks = dict(query_positions=places, key_positions=places, query_segments=ids, key_segments=ids)
        return dict(**marks, lookahead=count_lookahead(jnp.where(spans % 2, spans, 0)))
    return {}


def check_equal(case, seed, platform):
    shapes, mask, options, kind = CASES[case]
    *arrays, cotangent = inputs(**shapes, seed=seed)
    marks = draw_marks(kind, shapes["seq"], arrays[1].shape[1], seed)
    arrays += [SINKS.astype(arrays[0].dtype)] if "scale" in options or "cached" in case else []
    run = partial(value_and_gradients, arrays=arrays, cotangent=cotangent, marks=marks, mask=tuple(mask.items()))
    expected = run(reference_attention, options=tuple(options.items()))
    found = run(blockwise_attention, options=(*options.items(), ("block", BLOCK)), platform=platform)
    # bfloat16 has 8 bits; weights, gradients of scores and results are rounded. In float32 the order of sums differs.
    tolerance = 4e-6 if cotangent.dtype == jnp.float32 else 2**-4
    for ours, theirs, like in zip(found, expected, (cotangent, *arrays), strict=True):
        assert ours.dtype == like.dtype
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance)


QUICK = (
    *("one key head, a window, narrow values", "block-causal in a window", "looking ahead in a window"),
    *("half precision", "cached"),
)


@pytest.mark.ci
@pytest.mark.parametrize("case", mark_slow(CASES, but=QUICK))
@settings(max_examples=4)
@given(seed=st.integers(0, 99))
def test_blockwise_attention_equals_the_reference(case, seed):
    check_equal(case, seed, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one key head, a window, narrow values", "cached"])
def test_blockwise_attention_of_all_heads_at_once_equals_it_too(case):
    """The form for accelerators."""
    check_equal(case, 3, "tpu")


def attend_with_lse(query, key, value, sinks, soft_cap=1.5):
    """Compute causal attention and its log-sum-exp by definition."""
    key, value = (jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (key, value))
    scores = soft_cap * jnp.tanh(jnp.einsum("bqhd,bkhd->bqhk", query, key) * DIM**-0.5 / soft_cap)
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool)[:, None], scores, -jnp.inf)
    sinks = jnp.broadcast_to(sinks[:, None], (*scores.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([scores, sinks], axis=-1), axis=-1)
    return jnp.einsum("bqhk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), value), lse


@pytest.mark.one_case
@pytest.mark.parametrize("implementation", ["blockwise", "grouped"])
def test_log_sum_exp_and_its_gradient_equal_the_definition(implementation):
    query, key, value, cotangent = inputs(50)
    cotangents = cotangent, jax.random.normal(jax.random.key(5), (BATCH, 50, HEADS))

    def ours(query, key, value, sinks):
        options = dict(soft_cap=1.5, sinks=sinks)
        if implementation == "grouped":
            return grouped_query_attention_with_lse(query, key, value, AttentionMask(causal=True), **options)
        return blockwise_attention_with_lse(query, key, value, AttentionMask(causal=True), **options, block=BLOCK)

    def run(attend):
        outputs, back = jax.vjp(attend, query, key, value, SINKS)
        return *outputs, *back(cotangents)

    run = jax.jit(run, static_argnums=0)
    for found, expected in zip(run(ours), run(attend_with_lse), strict=True):
        np.testing.assert_allclose(found, expected, atol=4e-6)


@pytest.mark.ci
def test_outputs_over_two_sets_of_keys_merge():
    """As in a ring; in the second set nothing is visible to the early queries."""
    query, key, value, cotangent = inputs(40)
    positions = jnp.broadcast_to(jnp.arange(40), (BATCH, 40))

    def attend_in_two(query, key, value):
        parts = []
        for half in (slice(0, 20), slice(20, 40)):
            mask = AttentionMask(causal=True, query_positions=positions, key_positions=positions[:, half])
            parts.append(blockwise_attention_with_lse(query, key[:, half], value[:, half], mask, block=BLOCK))
        (left, left_lse), (right, right_lse) = parts
        lse = jnp.logaddexp(left_lse, right_lse)
        return left * jnp.exp(left_lse - lse)[..., None] + right * jnp.exp(right_lse - lse)[..., None]

    def run(attend):
        output, back = jax.vjp(attend, query, key, value)
        return output, *back(cotangent)

    run = jax.jit(run, static_argnums=0)
    expected = run(lambda *arrays: reference_attention(*arrays, AttentionMask(causal=True)))
    for found, wanted in zip(run(attend_in_two), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=4e-6)


@pytest.mark.parametrize("window", mark_slow([None, BLOCK], but=[BLOCK]))
def test_unseen_blocks_are_not_visited(window):
    """A product with keys that are not finite shows in the result even where the mask gives them a weight of zero."""
    arrays, spoiled = inputs(6 * BLOCK), 4 if window is None else 1
    spoil = lambda x: x.at[:, spoiled * BLOCK : (spoiled + 1) * BLOCK].set(jnp.nan)
    query, key, value, cotangent = arrays[0], spoil(arrays[1]), spoil(arrays[2]), arrays[3]
    run = partial(value_and_gradients, blockwise_attention, marks={}, options=(("block", BLOCK),))
    found = run((query, key, value), cotangent, mask=(("causal", True), ("window", window)))
    finite = lambda x: [bool(np.isfinite(block).all()) for block in np.split(np.asarray(x), 6, axis=1)]
    seen_by = [False] * 2 if window is None else [False, False]
    output, query_gradient, *_ = (finite(x) for x in found)
    expected = [True] * spoiled + seen_by + [True] * (4 - spoiled)
    assert output == query_gradient == expected
    if window is not None:  # keys are met by the queries of their block and the next
        assert finite(found[2]) == finite(found[3]) == [False] * 3 + [True] * 3


def test_temporaries_are_linear_in_length():
    """Those of the value and the gradient, up to 32k tokens."""

    def count_bytes(seq):
        shapes = [jax.ShapeDtypeStruct((1, seq, heads, DIM), jnp.float32) for heads in (2, 1, 1)]
        attend = lambda *arrays: blockwise_attention(*arrays, AttentionMask(causal=True)).sum()
        run = jax.jit(jax.value_and_grad(attend, (0, 1, 2)))
        return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = count_bytes(2048), count_bytes(32768)
    assert long < 1.02 * 16 * short
    assert long < 12 * 32768 * 2 * DIM * 4, "a dozen arrays like the queries"


def make_decoder(key, implementation):
    """Return a decoder of two layers, with a window, sinks, and fewer key heads than devices along `tensor`."""

    def make_block(key):
        options = dict(kv_heads=1, window=5, sinks=True, implementation=implementation)
        return Block(RMSNorm(16), Attention(16, 4, **options, key=key), RMSNorm(16), MLP(16, 16, key=key), Dropout(0.0))

    stack = Stack([make_block] * 2, key=key)
    return Decoder(Embedding(32, 16, key=key), stack, RMSNorm(16), None, Dropout(0.0))


@pytest.mark.slow
def test_blockwise_attention_on_a_mesh_equals_one_device():
    tokens = jax.random.randint(jax.random.key(0), (8, 20), 0, 32)
    segments = jnp.broadcast_to(jnp.arange(20) // 9 + 1, (8, 20))
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": segments, "positions": pack_positions(segments)}
    results = []
    for sizes, devices, name in (({}, 1, "grouped"), ({"data": 2, "fsdp": 2, "tensor": 2}, 8, "blockwise")):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
        model = zoo.init(partial(make_decoder, implementation=name), jax.random.key(0), mesh)
        results.append(jax.device_get(jax.tree.leaves(zoo.value_and_grad(zoo.cross_entropy, mesh)(model, batch))))
    for alone, sharded in zip(*results, strict=True):
        assert np.abs(alone - sharded).max() <= 2e-5 * np.abs(alone).max()


def test_choose_block_is_half_a_window():
    assert [choose_block(window) for window in (None, 1, 256, 700, 5000)] == [512, 128, 128, 350, 512]


@pytest.mark.parametrize(
    ("queries", "keys", "name"),
    [(1024, 1024, "grouped"), (1040, 1040, "blockwise"), (64, 99999, "grouped"), (256, 4097, "blockwise")],
)
def test_attention_of_many_keys_is_blockwise(queries, keys, name):
    sizes = dict(batch=1, query_seq=queries, key_seq=keys, heads=4, kv_heads=2, head_dim=8, value_dim=8)
    request = AttentionRequest(**sizes, dtype=jnp.float32, causal=True)
    with target_platform("cpu"):
        assert ATTENTION.select("auto", request).name == name


@pytest.mark.parametrize(("platform", "name"), [("cpu", "blockwise"), ("gpu", "grouped")])
def test_attention_to_a_long_cache_is_blockwise_on_cpus(platform, name):
    sizes = dict(batch=1, query_seq=256, key_seq=1536, heads=4, kv_heads=2, head_dim=8, value_dim=8)
    request = AttentionRequest(**sizes, dtype=jnp.float32, causal=True, has_positions=True)
    with target_platform(platform):
        assert ATTENTION.select("auto", request).name == name
