"""Promises of a decoder: causality, packed equals separate, padding is ignored, a KV cache changes nothing."""

import ast
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from zoo.layers import Dropout, Embedding, Linear, RMSNorm, TokenInfo
from zoo.models import Hidden, decoder
from zoo.models.decoder import UnrolledStack
from zoo.ops.attention import fused_attention, reference_attention
from zoo.parallel import Dim

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(**SIZES, windows=(4, None), qk_norm=True, key=KEY)


def random_tokens(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, SIZES["vocab"])


@eqx.filter_jit
def run(model, tokens, **options):
    return model(tokens, **options)


def test_decoder_is_one_file_from_tokens_to_logits():
    """The file is read from top to bottom: it imports neither the scan nor the other residual wirings."""
    tree = ast.parse(Path(decoder.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
    assert imported == {"hf.spec", "torch_habits"}


def test_the_gradient_of_a_tied_embedding_sums_both_uses():
    """Of a model without layers, whose embedding and head are equal matrices otherwise."""
    parts = {"stack": UnrolledStack(()), "norm": RMSNorm(8), "dropout": Dropout(0.0)}
    tied = decoder.Decoder(Embedding(16, 8, key=KEY), **parts, head=None)
    head = Linear(8, 16, in_=Dim("embed"), out=Dim("vocab"), key=KEY)
    head = eqx.tree_at(lambda head: head.weight, head, tied.embedding.weight)
    tokens = random_tokens((2, 5)) % 16

    @eqx.filter_jit
    @eqx.filter_grad
    def differentiate(model):
        return (jax.nn.log_softmax(model(tokens)) * jnp.arange(16)).sum()

    both = differentiate(decoder.Decoder(tied.embedding, **parts, head=head))
    expected = both.embedding.weight + both.head.weight
    assert jnp.allclose(differentiate(tied).embedding.weight, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # ops/attention/test_reference.py has it of attention
def test_decoder_is_causal_by_gradient(model):
    @eqx.filter_jit
    def influence(model, tokens):
        """d(logits at i) / d(embedding of token j), summed in magnitude: [i, j]."""

        def logits(x):
            hidden, _ = model.stack(Hidden(x), TokenInfo())
            return model.logits(hidden.x)[0].sum(-1)

        return jnp.abs(jax.jacrev(logits)(model.embedding(tokens))[:, 0]).sum(-1)

    flow = influence(model, random_tokens((1, 9)))
    assert (jnp.triu(flow, 1) == 0).all()
    assert (jnp.diag(flow) > 0).all()


@pytest.mark.slow
@given(first=st.integers(1, 9), seed=st.integers(0, 99))
def test_decoder_packed_equals_separate(model, first, seed):
    tokens = random_tokens((2, 10), seed)
    segment_ids = jnp.where(jnp.arange(10) < first, 3, 7) * jnp.ones((2, 1), int)
    packed = run(model, tokens, segment_ids=segment_ids)
    separate = run(model, jnp.roll(tokens, -first, 1))  # begins with the second document
    assert jnp.allclose(packed[:, first:], separate[:, : 10 - first], atol=1e-5)
    assert jnp.allclose(packed[:, :first], run(model, tokens)[:, :first], atol=1e-5)


@pytest.mark.slow
@given(padding=st.integers(0, 6), seed=st.integers(0, 99), side=st.sampled_from(["left", "right"]))
def test_decoder_ignores_padding(model, padding, seed, side):
    tokens = random_tokens((2, 10), seed)
    index = jnp.arange(10)
    mask = jnp.stack([index >= padding if side == "left" else index < 10 - padding, index >= 0])
    unpadded_tokens = jnp.roll(tokens, -padding, 1) if side == "left" else tokens
    padded, unpadded = run(model, tokens, mask=mask), run(model, unpadded_tokens)
    real = padded[0, padding:] if side == "left" else padded[0, : 10 - padding]
    assert jnp.allclose(real, unpadded[0, : 10 - padding], atol=1e-5)
    assert jnp.allclose(padded[1], run(model, tokens)[1], atol=1e-5)


@pytest.mark.slow
def test_decoder_attention_implementations_agree(model):
    tokens = random_tokens((2, 10))
    for implementation in (reference_attention, fused_attention):
        options = {"windows": (4, None), "qk_norm": True, "implementation": implementation}
        other = zoo.models.Transformer(**SIZES, **options, key=KEY)
        assert jnp.allclose(run(other, tokens), run(model, tokens), atol=1e-5)


@pytest.mark.slow
def test_decoder_generation_equals_full_passes(model):
    """Prompts of different lengths, padded on the left; more tokens than the windows hold."""
    tokens, mask = random_tokens((2, 6)), jnp.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)
    new = zoo.generate(model, tokens, max_new_tokens=8, mask=mask)
    for row, prompt in zip(new, (tokens[:1, 2:], tokens[1:]), strict=True):
        text = jnp.concatenate([prompt, row[None]], 1)
        logits = run(model, jnp.pad(text, ((0, 0), (0, 14 - text.shape[1]))))[0]
        assert (logits.argmax(-1)[prompt.shape[1] - 1 : text.shape[1] - 1] == row).all()


@pytest.mark.ci
def test_decoder_sampling_needs_a_key_and_follows_it(model):
    tokens = random_tokens((1, 6))
    draw = lambda seed: zoo.generate(
        model, tokens, max_new_tokens=8, temperature=1.0, key=jax.random.key(seed)
    ).tolist()
    assert draw(1) == draw(1) != draw(2)
    for options, message in (
        ({"temperature": 1.0}, "needs to be 0, or above 0 with a key"),
        ({"temperature": -1.0, "key": KEY}, "temperature=-1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens of at least 1"),
        ({"mask": jnp.array([[1, 1, 1, 1, 1, 0]], bool)}, "padded on the left"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.generate(model, tokens, **{"max_new_tokens": 3} | options)


def test_decoder_kv_caches_hold_no_more_than_their_window(model):
    states = model.init_state(2, 50)
    assert [state.positions.shape for state in states] == [(2, 4), (2, 50), (2, 4)]


def test_decoder_kv_cache_without_positions_raises(model):
    with pytest.raises(ValueError, match="with a cache the place of each token is not known"):
        model.hidden(random_tokens((1, 3)), TokenInfo(), model.init_state(1, 5))


@pytest.mark.ci
def test_decoder_dropout_only_with_a_key():
    model = zoo.models.Transformer(**SIZES, dropout=0.5, key=KEY)
    tokens = random_tokens((2, 7))
    assert jnp.array_equal(run(model, tokens), run(zoo.models.Transformer(**SIZES, key=KEY), tokens))
    first, second = run(model, tokens, key=KEY), run(model, tokens, key=jax.random.key(1))
    assert not jnp.allclose(first, second)
    assert jnp.array_equal(first, run(model, tokens, key=jax.random.split(KEY, 2)))


def test_decoder_refuses_mask_together_with_segments(model):
    with pytest.raises(ValueError, match="pass mask alone"):
        model(random_tokens((1, 4)), mask=jnp.ones((1, 4), bool), segment_ids=jnp.ones((1, 4), int))


def test_decoder_ids_outside_the_vocabulary_give_nan(model):
    assert jnp.isnan(model.embedding(jnp.array([[32, -1]]))).all()
