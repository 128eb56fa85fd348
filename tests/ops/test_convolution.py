"""The causal convolution: its custom VJP equals the gradient of the reference, on a mesh too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.quick import mark_slow
from zoo.ops.convolution import causal_conv1d, causal_conv1d_reference

IMPLEMENTATIONS = {"reference": causal_conv1d_reference, "custom_vjp": causal_conv1d}


def case(batch, seq, features, width, seed, *, segments=True, bias=True, dtype=jnp.float32):
    draw = np.random.default_rng(seed)
    length = seq + width - 1
    ids = jnp.asarray(np.cumsum(draw.random((batch, length)) < 0.3, axis=1), jnp.int32) if segments else None
    shapes = [(batch, length, features), (features, width), (features,), (batch, seq, features)]
    inputs, weight, shift, pull = (jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes)
    return (inputs, weight, shift if bias else None), ids, pull


@partial(jax.jit, static_argnums=0)
def with_gradients(name, operands, ids, pull):
    y, back = jax.vjp(lambda *operands: IMPLEMENTATIONS[name](*operands, ids), *operands)
    return y, back(pull)


SHAPES = [(batch, seq, width) for width in (1, 2, 4) for seq in (1, 2, 7, 8) for batch in (1, 3)]


@pytest.mark.one_case
@pytest.mark.parametrize(("batch", "seq", "width"), mark_slow(SHAPES, but=[(1, 2, 4), (3, 7, 2)]))
@settings(max_examples=4)
@given(seed=st.integers(0, 99), segments=st.booleans(), bias=st.booleans())
def test_causal_conv1d_equals_the_reference_with_gradients(batch, seq, width, seed, segments, bias):
    given = case(batch, seq, 3, width, seed, segments=segments, bias=bias)
    ours, theirs = (jax.tree.leaves(with_gradients(name, *given)) for name in IMPLEMENTATIONS)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_causal_conv1d_sums_bfloat16_gradients_in_float32():
    """Gradients of taps are sums over rows in float32, rounded once."""
    operands, ids, pull = case(4, 64, 3, 4, 0, dtype=jnp.bfloat16)
    fp32 = jax.tree.map(lambda x: x.astype(jnp.float32), (operands, pull))
    y, (grad_inputs, grad_weight, grad_bias) = with_gradients("custom_vjp", operands, ids, pull)
    exact_y, (exact_seen, exact_weight, exact_bias) = with_gradients("reference", fp32[0], ids, fp32[1])
    assert {x.dtype for x in (y, grad_inputs, grad_weight, grad_bias)} == {jnp.dtype(jnp.bfloat16)}
    for mine, exact in ((grad_weight, exact_weight), (grad_bias, exact_bias)):
        np.testing.assert_allclose(mine.astype(jnp.float32), exact, rtol=2**-8)
    for mine, exact in ((y, exact_y), (grad_inputs, exact_seen)):  # four products and their sums, rounded each
        np.testing.assert_allclose(mine.astype(jnp.float32), exact, atol=2**-7 * float(np.abs(exact).max()))


def test_causal_conv1d_all_reduces_weight_gradients_on_a_mesh():
    """Inside `shard_map` the gradient of replicated taps is all-reduced."""
    operands, ids, pull = case(4, 5, 3, 4, 1)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, same = PartitionSpec("data"), PartitionSpec()
    run = lambda operands, ids, pull: with_gradients.__wrapped__("custom_vjp", operands, ids, pull)
    specs = ((rows, same, same), rows, rows)
    shared = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(rows, (rows, same, same))))
    ours, theirs = shared(operands, ids, pull), with_gradients("reference", operands, ids, pull)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_causal_conv1d_raises_for_forward_mode():
    operands, ids, _ = case(1, 3, 2, 2, 0)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda inputs: causal_conv1d(inputs, *operands[1:], ids), operands[:1], operands[:1])
