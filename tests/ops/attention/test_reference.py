"""Attention: the reference against Python loops, the other implementations against the reference."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.quick import mark_slow
from zoo.ops import attention
from zoo.ops.attention.grouped import make_query_blocks
from zoo.tools.plan.inlining import Scan


def with_mask_options(implementation):
    """Wrap an implementation to take the arguments of `AttentionMask` as keywords."""

    def attend(query, key, value, sinks=None, *, scale=None, soft_cap=None, **mask_options):
        return implementation(
            query, key, value, attention.AttentionMask(**mask_options), scale=scale, soft_cap=soft_cap, sinks=sinks
        )

    return attend


IMPLEMENTATIONS = {
    "reference": with_mask_options(attention.reference_attention),
    "grouped": with_mask_options(attention.grouped_query_attention),
    "fused": with_mask_options(attention.fused_attention),
    "blockwise": with_mask_options(attention.blockwise_attention),
}
BATCH, SEQ, HEADS, KV_HEADS, DIM = 2, 7, 4, 2, 8


def inputs(seq=SEQ, key_seq=None, kv_heads=KV_HEADS, value_dim=DIM, sinks=None, dtype=jnp.float32):
    """Draw query, key and value, then `sinks` if given, and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    key_seq = key_seq or seq
    query, key, value, cotangent = (
        jax.random.normal(k, (BATCH, *shape), jnp.float32).astype(dtype)
        for k, shape in zip(
            keys,
            [(seq, HEADS, DIM), (key_seq, kv_heads, DIM), (key_seq, kv_heads, value_dim), (seq, HEADS, value_dim)],
            strict=True,
        )
    )
    more = () if sinks is None else (jnp.array(sinks, dtype),)
    return (query, key, value, *more), cotangent


def by_loops(query, key, value, sinks, sees, scale, soft_cap):
    """Compute attention for one query and one key at a time, in Python floats."""
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, q, h in np.ndindex(*query.shape[:3]):
        n = h // (query.shape[2] // key.shape[2])
        seen = [k for k in range(key.shape[1]) if sees(b, q, k)]
        scores = [scale * math.fsum(query[b, q, h] * key[b, k, n]) for k in seen]
        if soft_cap is not None:
            scores = [soft_cap * math.tanh(s / soft_cap) for s in scores]
        weights = [math.exp(s) for s in scores]
        total = math.fsum(weights) + (0 if sinks is None else math.exp(sinks[h]))
        for k, weight in zip(seen, weights, strict=True):
            output[b, q, h] += weight / total * value[b, k, n]
    return output


@pytest.mark.ci
@given(
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20]),
    block=st.sampled_from([None, 1, 2, 3]),
    soft_cap=st.sampled_from([None, 0.5, 5.0]),
    scale=st.sampled_from([None, 0.1, 1.0]),
    sinks=st.none() | st.lists(st.sampled_from([-9.0, -1.0, 0.0, 0.5, 12.0]), min_size=HEADS, max_size=HEADS),
    segments=st.none() | st.lists(st.integers(0, 2), min_size=2 * SEQ, max_size=2 * SEQ),
    places=st.none() | st.lists(st.integers(-2, 9), min_size=4 * SEQ, max_size=4 * SEQ),
    ahead=st.none() | st.lists(st.integers(0, 3), min_size=2 * SEQ, max_size=2 * SEQ),
)
def test_reference_attention_equals_python_loops(
    causal, window, block, soft_cap, scale, sinks, segments, places, ahead
):
    (query, key, value), _ = inputs(value_dim=5)
    mask_options, rules = {}, []
    at = np.broadcast_to(np.arange(SEQ), (2, BATCH, SEQ))
    if segments is not None:
        ids = np.array(segments).reshape(BATCH, SEQ)
        mask_options |= dict(query_segments=jnp.array(ids), key_segments=jnp.array(ids))
        rules.append(lambda b, q, k: ids[b, q] == ids[b, k])
    if places is not None:
        at = np.array(places).reshape(2, BATCH, SEQ)
        mask_options |= dict(query_positions=jnp.array(at[0]), key_positions=jnp.array(at[1]))
        rules.append(lambda b, q, k: at[1, b, k] >= 0)
    if not causal or (window or SEQ) < (block or 1):
        block = None
    extra = np.zeros((BATCH, SEQ), int)
    if places is not None and causal and ahead is not None:
        extra = np.array(ahead).reshape(BATCH, SEQ)
        mask_options |= dict(lookahead=jnp.array(extra))
    seen_from = at[0] if block is None else at[0] // block * block + block - 1
    age = lambda b, q, k: seen_from[b, q] - at[1, b, k]
    if causal:
        rules.append(lambda b, q, k: age(b, q, k) + extra[b, q] >= 0)
    if window:
        rules.append(lambda b, q, k: age(b, q, k) < window and (causal or age(b, q, k) > -window))

    sink_array = None if sinks is None else jnp.array(sinks)
    options = dict(causal=causal, window=window, block=block, soft_cap=soft_cap, scale=scale)
    output = IMPLEMENTATIONS["reference"](query, key, value, sink_array, **options, **mask_options)
    arrays = [np.asarray(x, np.float64) for x in (query, key, value)]
    sees = lambda b, q, k: all(rule(b, q, k) for rule in rules)
    expected = by_loops(*arrays, sinks, sees, DIM**-0.5 if scale is None else scale, soft_cap)
    np.testing.assert_allclose(output, expected, atol=2e-6)


SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 3, 3, 0, 0]])
# A full ring buffer, and a KV cache with empty slots.
RING = jnp.array([[7, 8, 9, 3, 4, 5, 6], [-1, -1, -1, 0, 1, 2, 3]])
NOW = jnp.array([[8, 9], [2, 3]])
PACKED = dict(query_segments=SEGMENTS, key_segments=SEGMENTS)
CACHED = dict(query_positions=NOW, key_positions=RING)
LONG = 200  # three blocks of 64 queries, and a shorter fourth
LONG_SEGMENTS = jnp.stack([jnp.arange(LONG) // 70, jnp.arange(LONG) // 130])
LONG_PACKED = dict(query_segments=LONG_SEGMENTS, key_segments=LONG_SEGMENTS)
SINKS = (-1.0, 0.0, 0.5, 2.0)
CASES = {
    "causal": (dict(causal=True), {}),
    "one key head per query head, and a scale": (dict(causal=True, scale=0.9), dict(kv_heads=HEADS)),
    "one key head, and a window": (dict(causal=True, window=3), dict(kv_heads=1)),
    "bidirectional in a window": (dict(causal=False, window=2), {}),
    "cross-attention": (dict(causal=False), dict(seq=2, key_seq=SEQ)),
    "cap": (dict(causal=True, soft_cap=1.5), {}),
    "narrow values": (dict(causal=False), dict(value_dim=5)),
    "packed": (dict(causal=True, **PACKED), {}),
    "packed, bidirectional in a window": (dict(causal=False, window=2, **PACKED), {}),
    "cached": (dict(causal=True, window=3, **CACHED), dict(seq=2, key_seq=SEQ)),
    "in blocks": (dict(causal=True), dict(seq=LONG)),
    "in blocks, and a window": (dict(causal=True, window=70), dict(seq=LONG)),
    "in blocks, packed in a window of one": (dict(causal=True, window=1, **LONG_PACKED), dict(seq=LONG)),
    "in blocks, packed": (dict(causal=True, **LONG_PACKED), dict(seq=LONG, kv_heads=1)),
    "block-causal": (dict(causal=True, block=3), dict(value_dim=5)),
    "looking ahead in a window, cached": (
        dict(causal=True, window=3, lookahead=jnp.array([[1, 0], [1, 0]]), **CACHED),
        dict(seq=2, key_seq=SEQ),
    ),
    "block-causal in a window, cached": (dict(causal=True, block=2, window=3, **CACHED), dict(seq=2, key_seq=SEQ)),
    "in blocks, block-causal in a window": (dict(causal=True, block=48, window=70), dict(seq=LONG)),
    "in blocks, block-causal, packed": (dict(causal=True, block=33, **LONG_PACKED), dict(seq=LONG)),
    "sinks": (dict(causal=True), dict(sinks=SINKS)),
    "sinks and a cap, no mask": (dict(causal=False, soft_cap=1.5), dict(sinks=SINKS)),
    "sinks above all scores": (dict(causal=True), dict(sinks=(30.0, 60.0, 90.0, 120.0))),
    "sinks, cached": (dict(causal=True, window=3, **CACHED), dict(seq=2, key_seq=SEQ, sinks=SINKS)),
    "sinks, packed": (dict(causal=True, window=3, **PACKED), dict(sinks=SINKS)),
    "sinks, in blocks, and a window": (dict(causal=True, window=70), dict(seq=LONG, sinks=SINKS)),
    "sinks, in blocks, packed": (dict(causal=True, **LONG_PACKED), dict(seq=LONG, kv_heads=1, sinks=SINKS)),
}
ROUNDED = (
    *("causal", "cap", "packed", "cached", "in blocks, and a window"),
    *("sinks", "sinks, cached", "sinks, packed", "sinks, in blocks, and a window"),
)
QUICK = (
    *("one key head per query head, and a scale", "one key head, and a window", "cross-attention", "cap"),
    *("narrow values", "packed, bidirectional in a window", "cached", "in blocks, packed"),
    "in blocks, block-causal in a window",
    *("sinks above all scores", "sinks, cached", "sinks, packed", "sinks, in blocks, and a window"),
)
BEYOND_FUSED = ("cap", "narrow values", "block-causal", *(case for case in CASES if case.startswith("sinks")))


@partial(jax.jit, static_argnames=("implementation", "options"))
def value_and_gradients(implementation, options, arrays, mask_options, cotangent):
    output, back = jax.vjp(lambda *arrays: implementation(*arrays, **dict(options), **mask_options), *arrays)
    return output, *back(cotangent)


def run(implementation, options, arrays, cotangent):
    mask_options = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    options = tuple((name, x) for name, x in options.items() if name not in mask_options)
    return value_and_gradients(implementation, options, arrays, mask_options, cotangent)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *mark_slow(((case, jnp.float32) for case in CASES), but=QUICK, name=lambda pair: pair[0]),
        *mark_slow(((case, jnp.bfloat16) for case in ROUNDED), but=("sinks, packed",), name=lambda pair: pair[0]),
    ],
    ids=[*CASES, *(f"{case}, bfloat16" for case in ROUNDED)],
)
def test_attention_implementations_equal_the_reference(case, dtype):
    options, shapes = CASES[case]
    arrays, cotangent = inputs(**shapes, dtype=dtype)
    expected = run(IMPLEMENTATIONS["reference"], options, arrays, cotangent)
    # bfloat16 has 8 bits. Weights and results are rounded, and in the backward pass scores: several errors of 2^-9, of
    # sums below 8. In float32 only the order of sums differs; its error grows as the root of the number of terms.
    terms = arrays[1].shape[1] / SEQ
    tolerance = 2e-6 * terms**0.5 if dtype == jnp.float32 else 8 * 4 * 2**-9
    for name in ("grouped", "fused"):
        if name == "fused" and case in BEYOND_FUSED:
            continue
        result = run(IMPLEMENTATIONS[name], options, arrays, cotangent)
        for ours, theirs, like in zip(result, expected, (cotangent, *arrays), strict=True):
            assert ours.dtype == like.dtype
            ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
            np.testing.assert_allclose(ours, theirs, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("window", "first_keys"), [(None, [0, 0, 0, 0]), (1, [0, 64, 128, 192]), (70, [0, 0, 59, 123]), (500, [0, 0, 0, 0])]
)
def test_make_query_blocks_skips_masked_keys(window, first_keys):
    found = make_query_blocks(attention.AttentionMask(True, window), LONG, LONG)
    assert [(queries.start, queries.stop) for queries, _ in found] == [(0, 64), (64, 128), (128, 192), (192, 200)]
    assert [(keys.start, keys.stop) for _, keys in found] == list(zip(first_keys, (64, 128, 192, 200), strict=True))
    assert len(make_query_blocks(attention.AttentionMask(False, window), LONG, LONG)) == 1
    assert make_query_blocks(attention.AttentionMask(True, window), 63, 63) == [(slice(0, 63), slice(0, 63))]


def test_make_query_blocks_has_whole_blocks_of_keys():
    found = make_query_blocks(attention.AttentionMask(True, 100, block=48), LONG, LONG)
    assert [(keys.start, keys.stop) for _, keys in found] == [(0, 96), (0, 144), (29, 192), (93, 200)]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("implementation", "sinks"),
    [
        *mark_slow(
            [(implementation, None) for implementation in IMPLEMENTATIONS.values()],
            but=[IMPLEMENTATIONS["fused"]],  # which takes no sinks
            name=lambda pair: pair[0],
        ),
        *((IMPLEMENTATIONS[name], SINKS) for name in ("reference", "grouped", "blockwise")),
    ],
    ids=[*IMPLEMENTATIONS, "reference, sinks", "grouped, sinks", "blockwise, sinks"],
)
def test_attention_of_a_masked_query_is_zero_without_gradient(implementation, sinks):
    arrays, cotangent = inputs(seq=2, key_seq=SEQ, sinks=sinks)
    nothing = jnp.full((BATCH, SEQ), -1).at[1].set(jnp.arange(SEQ))
    options = dict(causal=True, query_positions=jnp.array([[3, 4], [-1, 4]]), key_positions=nothing)
    output, *gradients = run(implementation, options, arrays, cotangent)
    assert (output[0] == 0).all() and (output[1, 0] == 0).all() and (output[1, 1] != 0).all()
    assert all(np.isfinite(g).all() for g in gradients)
    assert all((g[0] == 0).all() for g in gradients[:3]) and (gradients[0][1, 0] == 0).all()
    if sinks:
        alone, _ = inputs(seq=2, key_seq=SEQ, sinks=sinks)
        *_, seeing = run(implementation, options, alone, cotangent.at[0].set(0).at[1, 0].set(0))
        np.testing.assert_array_equal(gradients[3], seeing, "only the query that is not masked contributes")


@pytest.mark.one_case
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("window", mark_slow([None, 3], but=[3]))
def test_attention_is_causal_by_gradient(implementation, window):
    arrays, _ = inputs()
    outputs = lambda arrays: implementation(*arrays, causal=True, window=window).sum((0, 2, 3))
    flows = [(jnp.abs(g).sum((1, 3, 4)) > 0) for g in jax.jit(jax.jacrev(outputs))(arrays)]
    earlier = np.tri(SEQ, dtype=bool) & ~np.tri(SEQ, k=-(window or SEQ), dtype=bool)
    np.testing.assert_array_equal(flows[2], earlier)
    assert not (flows[1] & ~earlier).any()
    assert not (flows[0] & ~np.eye(SEQ, dtype=bool)).any()


@pytest.mark.one_case
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", mark_slow([True, False], but=[True]))
def test_attention_of_packed_sequences_equals_separate(implementation, causal):
    arrays, _ = inputs()
    attend = jax.jit(partial(implementation, causal=causal, window=2))
    segments = jnp.array([[1, 1, 1, 0, 2, 2, 2]] * BATCH)  # two sequences of three tokens, and padding between
    packed = attend(*arrays, query_segments=segments, key_segments=segments)
    for part in (np.s_[:, :3], np.s_[:, 4:]):
        np.testing.assert_allclose(packed[part], attend(*(x[part] for x in arrays)), atol=2e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_attention_over_a_kv_cache_in_any_slot_order(implementation):
    (query, key, value), _ = inputs()
    attend = jax.jit(partial(implementation, causal=True, window=4))
    expected = attend(query, key, value)[:, -2:]
    order = np.array([5, 2, 6, 0, 3, 1, 4])
    slots = lambda x: jnp.concatenate([x[:, order], jnp.full_like(x[:, :2], 1e4)], axis=1)
    positions = jnp.broadcast_to(jnp.array([*order, -1, -1]), (BATCH, SEQ + 2))
    now = jnp.broadcast_to(jnp.array([SEQ - 2, SEQ - 1]), (BATCH, 2))
    places = dict(query_positions=now, key_positions=positions)
    output = attend(query[:, -2:], slots(key), slots(value), **places)
    np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "fused", "blockwise"])
def test_attention_on_a_mesh_equals_one_device(name):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays, cotangent = inputs()
    sharded, rows = P("data", None, "tensor"), P("data")

    def run_shard(segments, cotangent, *arrays):
        segments = dict(query_segments=segments, key_segments=segments)
        output, back = jax.vjp(partial(IMPLEMENTATIONS[name], causal=True, **segments), *arrays)
        return output, *back(cotangent)

    on_mesh = jax.jit(jax.shard_map(run_shard, mesh=mesh, in_specs=(rows, *4 * [sharded]), out_specs=sharded))
    operands = (SEGMENTS, cotangent, *arrays)
    for ours, alone in zip(on_mesh(*operands), jax.jit(run_shard)(*operands), strict=True):
        np.testing.assert_allclose(ours, alone, atol=2e-6)


def test_block_causal_mask_has_whole_blocks():
    """A key is seen from its own block, and from later ones. Padding stays masked."""
    positions = jnp.array([[4, 5, 6, 7, 8, -1], [0, 1, 2, 0, 1, 2]])
    mask = attention.AttentionMask(True, block=3, query_positions=positions, key_positions=positions)
    numbers = positions // 3
    expected = (numbers[:, None, :] <= numbers[:, :, None]) & (positions >= 0)[:, None, :]
    np.testing.assert_array_equal(mask.materialize(6, 6), expected)
    assert not mask.materialize(6, 6)[0, 5].any()
    plain, single = (attention.AttentionMask(True, block=block).materialize(6, 6) for block in (None, 1))
    np.testing.assert_array_equal(plain, single)


def test_attention_mask_materializes_to_none_if_full():
    assert attention.AttentionMask(causal=False).materialize(3, 5) is None
    assert attention.AttentionMask(causal=True).materialize(3, 3).shape == (1, 3, 3)
    slots = attention.AttentionMask(False, query_positions=jnp.array([[0, 1, 2]]), key_positions=jnp.array([[0, -1]]))
    np.testing.assert_array_equal(slots.materialize(3, 2), [[[True, False]] * 3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("options", "shapes", "says"),
    [
        (dict(causal=True), dict(seq=2, key_seq=SEQ), "2 queries and 7 keys"),
        (dict(causal=True, window=0), {}, "window is 0"),
        (dict(causal=True, block=0), {}, "block is 0"),
        (dict(causal=False, block=2), {}, "block=2 is a causal mask of blocks, and causal is False"),
        (dict(causal=True, window=2, block=3), {}, "a window of 2 is shorter than a block of 3"),
        (dict(causal=True, lookahead=SEGMENTS), {}, "lookahead counts from positions"),
        (dict(causal=True, query_segments=SEGMENTS), {}, "segments for queries and keys"),
        (dict(causal=True, key_positions=SEGMENTS), {}, "positions for queries and keys"),
        (dict(causal=True), dict(kv_heads=3), "4 query heads"),
    ],
)
def test_attention_raises_for_bad_arguments(implementation, options, shapes, says):
    with pytest.raises(ValueError, match=says):
        implementation(*inputs(**shapes)[0], **options)


def test_fused_attention_raises_for_unsupported_arguments():
    with pytest.raises(ValueError, match="has no sinks"):
        IMPLEMENTATIONS["fused"](*inputs(sinks=SINKS)[0], causal=True)
    with pytest.raises(ValueError, match="soft_cap"):
        IMPLEMENTATIONS["fused"](*inputs()[0], causal=True, soft_cap=50.0)
    with pytest.raises(ValueError, match="5 and 8 wide"):
        IMPLEMENTATIONS["fused"](*inputs(value_dim=5)[0], causal=True)


def test_attention_to_selected_keys_or_refused():
    (query, key, value), _ = inputs()
    selected = np.random.default_rng(0).random((BATCH, SEQ, SEQ)) < 0.4
    selected[0, 2] = False
    sees = lambda b, q, k: k <= q and selected[b, q, k]
    expected = by_loops(*map(np.float64, (query, key, value)), None, sees, DIM**-0.5, None)
    for name in ("reference", "grouped", "fused"):
        output = IMPLEMENTATIONS[name](query, key, value, causal=True, selected=jnp.asarray(selected))
        np.testing.assert_allclose(output, expected, atol=1e-5)
    with pytest.raises(ValueError, match="queries select their keys. Use grouped_query_attention"):
        IMPLEMENTATIONS["blockwise"](query, key, value, causal=True, selected=jnp.asarray(selected))
    with pytest.raises(ValueError, match="splash_attention cannot compute this, because queries select their keys"):
        with_mask_options(attention.splash_attention)(query, key, value, causal=True, selected=jnp.asarray(selected))


def test_no_constant_for_all_layers_is_as_large_as_the_scores():
    """JAX computes once, and keeps, what an iteration computes from constants alone: the score of masked keys, too, if
    it were broadcast to all of them. The mask is one byte for each score."""
    (query, key, value), _ = inputs()

    def loss(query):
        attend = lambda x, _: (IMPLEMENTATIONS["grouped"](x, key, value, causal=True), None)
        return jax.lax.scan(attend, query, length=3)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(query).jaxpr
    (forward, _) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    constants = forward.invars[: Scan.of(forward).consts]
    assert constants and all(x.aval.dtype == bool or x.aval.size < BATCH * HEADS * SEQ**2 for x in constants)
