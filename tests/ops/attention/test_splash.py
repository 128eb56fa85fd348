"""Splash attention: equal to the reference in Pallas' interpreter, over a mesh too, and compiled for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.aot import compile_for
from zoo.ops.attention import AttentionMask, attention, reference_attention, splash_attention
from zoo.ops.attention.request import AttentionRequest
from zoo.ops.attention.splash import find_splash_drawback, find_splash_obstacle
from zoo.ops.platform import target_platform

SEQ = 128


def draw(batch=2, heads=2, kv_heads=1, dim=16, value_dim=16):
    """Draw queries, keys, values and sinks."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (batch, SEQ, heads, dim), (batch, SEQ, kv_heads, dim), (batch, SEQ, kv_heads, value_dim), (heads,)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def make_mask(batch, **rules: Any):
    ids = jnp.repeat(jnp.array([[1, 2, 3, 3], [1, 1, 1, 2]][:batch]), SEQ // 4, axis=1)
    segments: dict[str, Any] = {"query_segments": ids, "key_segments": ids} if rules.pop("segments", False) else {}
    return AttentionMask(**rules, **segments)


def with_gradients(attend, rules, soft_cap):
    """Return a function of queries, keys, values and sinks: the output and its gradients."""

    def run(query, key, value, sinks):
        mask = make_mask(len(query), **rules)
        loss = lambda *x: (jnp.sin(attend(*x[:3], mask, soft_cap=soft_cap, sinks=x[3])) ** 2).sum()
        output = attend(query, key, value, mask, soft_cap=soft_cap, sinks=sinks)
        return output, jax.grad(loss, argnums=(0, 1, 2, 3))(query, key, value, sinks)

    return run


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rules", "soft_cap"),
    [
        ({"causal": True, "segments": True}, 3.0),
        pytest.param({"causal": True, "window": 40}, None, marks=pytest.mark.slow),
        ({"causal": False, "segments": True, "window": 40}, None),
    ],
)
def test_splash_equals_the_reference(rules, soft_cap):
    operands = draw(value_dim=8)
    ours, theirs = (
        jax.jit(with_gradients(attend, dict(rules), soft_cap))(*operands)
        for attend in (splash_attention, reference_attention)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), ours, theirs)


@pytest.mark.slow
def test_splash_runs_over_a_mesh():
    operands = draw()
    rows, whole = PartitionSpec("data"), PartitionSpec()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    # Rows have the segments of the first one: each device has one row.
    run: Any = with_gradients(splash_attention, {"causal": True, "segments": True}, None)
    specs = {"in_specs": (rows, rows, rows, whole), "out_specs": (rows, (rows, rows, rows, whole))}
    output, gradients = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(*operands)
    rows_alone = [run(*(x[i : i + 1] for x in operands[:3]), operands[3]) for i in range(2)]
    np.testing.assert_allclose(output, jnp.concatenate([row[0] for row in rows_alone]), atol=1e-6)
    np.testing.assert_allclose(gradients[0], jnp.concatenate([row[1][0] for row in rows_alone]), atol=1e-6)
    np.testing.assert_allclose(gradients[3], sum(row[1][3] for row in rows_alone), atol=1e-5)


def test_splash_differentiates_in_a_scan_over_a_mesh():
    """JAX evaluates the equations of the body again, with the check of varying axes."""
    query, key, value, _ = draw()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loss(attend, query, key, value):
        mask = make_mask(len(query), causal=True)
        layer = lambda x, _: (jnp.sin(x + attend(x, key, value, mask)), None)
        return jax.lax.psum(jax.lax.scan(layer, query, None, length=2)[0].sum(), "data")

    def differentiate(attend):
        run = jax.grad(lambda *x: loss(attend, *x), argnums=(0, 1, 2))
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")))

    ours, theirs = (differentiate(attend)(query, key, value) for attend in (splash_attention, reference_attention))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), ours, theirs)


def test_splash_says_what_it_cannot_compute():
    def request(mask, seq=SEQ):
        x = jnp.zeros((2, seq, 2, 64), jnp.bfloat16)
        return AttentionRequest.from_arrays(x, x, x, mask, None, None)

    ids = jnp.zeros((2, SEQ), int)
    positions = AttentionMask(causal=True, query_positions=ids, key_positions=ids)
    assert find_splash_obstacle(request(AttentionMask(causal=True))) is None
    assert "positions" in str(find_splash_obstacle(request(positions)))
    assert "later ones of their block" in str(find_splash_obstacle(request(AttentionMask(True, block=4))))
    assert "not a multiple of 128" in str(find_splash_obstacle(request(AttentionMask(causal=True), 100)))
    own = AttentionMask(causal=True, query_segments=ids, key_segments=ids + 1)
    assert "separate segments" in str(find_splash_obstacle(request(own)))
    assert "interpreter" in str(find_splash_drawback(request(AttentionMask(causal=True))))
    with target_platform("gpu"):
        assert "runs on TPU" in str(find_splash_obstacle(request(AttentionMask(causal=True))))
    query, key, value, _ = draw()
    with pytest.raises(ValueError, match="splash_attention cannot compute this, because 100 tokens are not a multiple"):
        splash_attention(query[:, :100], key[:, :100], value[:, :100], AttentionMask(causal=True))


@pytest.mark.aot
@pytest.mark.parametrize(("dim", "value_dim", "window"), [(64, 64, None), (128, 128, 64), (192, 128, None)])
def test_splash_compiles_for_tpu_behind_auto(dim, value_dim, window):
    def loss(query, key, value, ids):
        mask = AttentionMask(causal=True, window=window, query_segments=ids, key_segments=ids)
        return attention(query, key, value, mask).astype(jnp.float32).sum()

    shape = lambda heads, dim: jax.ShapeDtypeStruct((2, 512, heads, dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    program = compile_for("v5e:2x4", gradient, shape(4, dim), shape(2, dim), shape(2, value_dim), ids)
    assert program.text.count("tpu_custom_call") >= 3  # forward, dq, dk and dv
