"""Attention over depth equals its formula, written out sublayer by sublayer; loops, meshes and decoding agree."""

import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.parallel.any_mesh import assert_same_step, differentiate, make_any_mesh
from zoo.layers import Attention, GatedMLP, RMSNorm, TokenInfo
from zoo.models import Hidden, build_decoder
from zoo.models.attention_residuals import AttentionResidual, AttentionResidualBlock, make_attention_residuals
from zoo.parallel import SEQUENCE

VOCAB, EMBED, LAYERS, GROUP = 32, 16, 3, 2
TOKENS = jax.random.randint(jax.random.key(1), (4, 8), 0, VOCAB)
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def make(key):
    norm = partial(RMSNorm, EMBED)
    layers = [(partial(Attention, EMBED, 4), partial(GatedMLP, EMBED, 20))] * LAYERS
    wiring = make_attention_residuals(EMBED, LAYERS, norm, group_size=GROUP)
    return build_decoder(vocab=VOCAB, embed=EMBED, layers=layers, norm=norm, tied=True, **wiring, key=key)


@functools.cache
def make_random():
    return randomize(make)


def attend(residual, sources):
    keys = jnp.stack([residual.norm(source) for source in sources])
    weights = jax.nn.softmax(jnp.einsum("nbte,e->nbt", keys, residual.query), axis=0)
    return jnp.einsum("nbt,nbte->bte", weights, jnp.stack(sources))


def compute_formula(model):
    """Equation 6: finished sums, and the sum of the group that runs once it has begun."""
    sums = [model.embed(TOKENS, TokenInfo()).x[..., :EMBED]]
    running = None
    for number, block in enumerate(model.stack.iter_blocks()):
        if number % GROUP == 0 and running is not None:
            sums.append(running)
            running = None
        read = attend(block.mixer_residual, sums if running is None else [*sums, running])
        mixed, _ = block.mixer(block.mixer_norm(read), TokenInfo())
        running = mixed if running is None else running + mixed
        fed, _ = block.ffn(block.ffn_norm(attend(block.ffn_residual, [*sums, running])))
        running = running + fed
    return model.logits(model.norm.norm(attend(model.norm.residual, [*sums, running])))


@functools.cache
def expected():
    return differentiate(zoo.configure(make_random(), loop="plain"), BATCH)


def test_logits_equal_the_formula():
    """Two groups, the second of one layer."""
    model = make_random()
    assert relative_error(eqx.filter_jit(model)(TOKENS), eqx.filter_jit(compute_formula)(model)) < 1e-5


def test_it_begins_with_the_mean_of_the_sums_that_have_begun():
    residual, sums = AttentionResidual(EMBED, partial(RMSNorm, EMBED)), activations(2, 3, 4, EMBED)
    np.testing.assert_allclose(residual(sums), sums.mean(-2), atol=1e-6)
    np.testing.assert_allclose(residual(sums, 2), sums[..., :2, :].mean(-2), atol=1e-6)


def test_a_scan_equals_the_plain_loop():
    assert_same_step(differentiate(zoo.configure(make_random(), loop="scan", remat="full"), BATCH), expected())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (None, {"data": 2, "fsdp": 2, "tensor": 2}),
        (None, {"data": 2, "context": 2, "tensor": 2}),
        (SEQUENCE, {"fsdp": 2, "tensor": 2}),
    ],
)
def test_meshes_equal_one_device(layout, sizes):
    assert_same_step(
        differentiate(zoo.configure(make_random(), loop="scan"), BATCH, make_any_mesh(layout, **sizes)), expected()
    )


@pytest.mark.ci
def test_decoding_equals_the_full_pass():
    model = make_random()
    new = zoo.generate(model, TOKENS, max_new_tokens=3)
    longer = jnp.concatenate([TOKENS, new], axis=1)
    np.testing.assert_array_equal(jnp.argmax(eqx.filter_jit(model)(longer), -1)[:, TOKENS.shape[1] - 1 : -1], new)


def test_what_is_not_supported_is_refused_by_name():
    with pytest.raises(TypeError, match="AttentionResidualBlock counts layers, which Hidden does not"):
        object.__new__(AttentionResidualBlock)(Hidden(activations(1, 2, EMBED)), TokenInfo())
    with pytest.raises(ValueError, match="at least one layer, not layers=3, group_size=0"):
        make_attention_residuals(EMBED, 3, partial(RMSNorm, EMBED), group_size=0)
    model = zoo.configure(eqx.filter_eval_shape(make, jax.random.key(0)), loop="scan")
    with pytest.raises(NotImplementedError, match="DepthHidden has layer inputs .* use a mesh with pipe=1"):
        eqx.filter_eval_shape(zoo.value_and_grad(zoo.cross_entropy, make_any_mesh(pipe=3)), model, BATCH)
