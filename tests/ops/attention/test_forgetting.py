"""Forgetting attention equals its formula and reference values, whatever the length, decays, segments and window."""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.parity_ops import distance
from tests.quick import mark_slow
from zoo.ops.attention import AttentionMask, attention, blockwise_attention, forgetting_attention

MORE = os.environ.get("ZOO_PARITY")
IMPLEMENTATIONS = {
    "grouped": "grouped",
    "blocks of 16": partial(blockwise_attention, block=16),
    "reference": "reference",
}
BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 8, 5


def draw(seq, seed, strength):
    """Draw query, key, value, log gates and a cotangent; a tenth of the gates is all but closed."""
    rng = np.random.default_rng(seed)
    shapes = (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM), (HEADS, VALUE_DIM)
    query, key, value, cotangent = (rng.normal(size=(BATCH, seq, *shape)) for shape in shapes)
    log_forget = -strength * rng.random((BATCH, seq, KV_HEADS)) * np.where(rng.random((BATCH, seq, 1)) < 0.1, 20, 1)
    return [jnp.asarray(x, jnp.float32) for x in (query, key, value, log_forget, cotangent)]


def attend_by_formula(query, key, value, log_forget, mask, soft_cap):
    """Attention with the log gates of (j, t] summed for each pair: no difference of sums, and so exact."""
    seq = query.shape[1]
    places = jnp.arange(seq)
    between = (places > places[:, None, None].swapaxes(0, 1)) & (places <= places[:, None, None])  # t, j, i
    bias = jnp.einsum("tji,bin->bntj", between.astype(jnp.float32), log_forget, precision="highest")
    query = query.reshape(*query.shape[:2], KV_HEADS, -1, DIM)
    scores = jnp.einsum("btngd,bjnd->bngtj", query, key, precision="highest") * DIM**-0.5
    scores = soft_cap * jnp.tanh(scores / soft_cap) + bias[:, :, None]
    scores = jnp.where(mask.materialize(seq, seq)[:, None, None], scores, -jnp.inf)
    heads = jnp.einsum("bngtj,bjnv->btngv", jax.nn.softmax(scores, axis=-1), value, precision="highest")
    return heads.reshape(*heads.shape[:2], HEADS, -1)


@partial(jax.jit, static_argnames=("window", "names"))
def run_all(arrays, cotangent, segments, *, window, names):
    """Return outputs and gradients of the formula and of the implementations, and outputs in bfloat16."""
    mask = AttentionMask(True, window, segments, segments)

    def differentiate(attend, arrays):
        output, back = jax.vjp(lambda *arrays: attend(*arrays, mask, soft_cap=3.0), *arrays)
        return output, *back(cotangent.astype(output.dtype))

    half = [x.astype(jnp.bfloat16) for x in arrays[:3]]
    rounded = differentiate(attend_by_formula, [*(x.astype(jnp.float32) for x in half), arrays[3]])
    found = {}
    for name in names:
        attend = partial(forgetting_attention, implementation=IMPLEMENTATIONS[name])
        found[name] = differentiate(attend, arrays), differentiate(attend, [*half, arrays[3]])
    return differentiate(attend_by_formula, arrays), rounded, found


@settings(max_examples=6)
@given(seed=st.integers(0, 999), strength=st.sampled_from([0.01, 1.0, 10.0]), often=st.sampled_from([0.0, 0.1]))
@pytest.mark.parametrize(
    ("seq", "window", "names"),
    [
        (50, 20, ("grouped", "blocks of 16")),
        pytest.param(37, None, tuple(IMPLEMENTATIONS), marks=pytest.mark.slow),
        pytest.param(129, None, tuple(IMPLEMENTATIONS), marks=pytest.mark.slow),
        pytest.param(1, None, tuple(IMPLEMENTATIONS), marks=pytest.mark.slow),
    ],
)
def test_forgetting_attention_equals_its_formula(seq, window, names, seed, strength, often):
    """With a soft cap and shared key heads; in bfloat16 within 2e-2 of float32."""
    *arrays, cotangent = draw(seq, seed, strength)
    starts = np.random.default_rng(seed).random((BATCH, seq)) < often
    segments = jnp.asarray(starts.cumsum(1))
    expected, rounded, found = run_all(arrays, cotangent, segments, window=window, names=names)
    largest = max(float(jnp.abs(x).max()) for x in expected[1:])
    for name, (ours, half) in found.items():
        for place, (result, wanted) in enumerate(zip(ours, expected, strict=True)):
            floor = 1e-3 * largest if place else 0
            assert jnp.abs(result - wanted).max() <= 1e-5 * max(float(jnp.abs(wanted).max()), floor), (name, place)
        for place, (result, wanted) in enumerate(zip(half, rounded, strict=True)):
            error = jnp.abs(result.astype(jnp.float32) - wanted).max()
            assert error <= 2e-2 * max(float(jnp.abs(wanted).max()), largest if place else 0), (name, place)


@pytest.mark.parametrize(("name", "reason"), [("splash", "scores have decays"), ("tokamax", ""), ("cudnn", "")])
def test_kernels_refuse_decays_by_name(name, reason):
    *arrays, _ = draw(128, 0, 1.0)
    attend = partial(forgetting_attention, attention_mask=AttentionMask(True), implementation=name)
    with pytest.raises(ValueError, match=f"'{name}' cannot .*{reason}.*These can: grouped, blockwise, reference"):
        jax.eval_shape(attend, *arrays)


def test_functions_need_the_option_only_for_decays():
    def attend(query, key, value, mask, *, scale, soft_cap, sinks):
        return value[:, :, :1].repeat(HEADS, axis=2)

    *arrays, _ = draw(5, 0, 1.0)
    assert (attention(*arrays[:3], AttentionMask(True), implementation=attend) == arrays[2][:, :, :1]).all()
    forget = partial(forgetting_attention, attention_mask=AttentionMask(True), implementation=attend)
    with pytest.raises(TypeError, match=r"attend\(\) got an unexpected keyword argument 'decay_channels'"):
        jax.eval_shape(forget, *arrays)


@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder of reference cases")
@pytest.mark.parametrize("implementation", ["grouped", "blockwise"])
@pytest.mark.parametrize("variant", mark_slow(["base", "even", "strong", "one"], but=["base", "strong"]))
def test_forgetting_attention_equals_reference_values(variant, implementation):
    """In float64: outputs, and the gradient of every input."""
    arrays = load_file(Path(str(MORE)) / "ops_more" / f"forgetting_attention.{variant}.safetensors")

    @jax.jit
    def run(*inputs):
        attend = partial(forgetting_attention, attention_mask=AttentionMask(True), implementation=implementation)
        output, back = jax.vjp(attend, *inputs)
        return output, *back(jnp.asarray(arrays["weight.o"]))

    output, *gradients = run(*(jnp.asarray(arrays[f"in.{name}"]) for name in "qkvg"))
    assert distance(output, arrays["f64.o"]) <= 5e-6
    for name, gradient in zip("qkvg", gradients, strict=True):
        assert distance(gradient, arrays[f"f64.grad.{name}"]) <= 1e-4, name
