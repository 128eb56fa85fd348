"""Hidden states equal a hand-written loop over layers, scores equal NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from zoo.layers import TokenInfo
from zoo.layers.token_info import pack_positions
from zoo.models import Hidden
from zoo.models.decoder import AbstractStack
from zoo.models.stack import swap_stack

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(**SIZES, windows=(4, None), qk_norm=True, tied=False, key=KEY)


def random_tokens(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, SIZES["vocab"])


@eqx.filter_jit
def logits(model, tokens, **options):
    return model(tokens, **options)


score = eqx.filter_jit(zoo.score)


def score_numpy(model, tokens, **options):
    """Log-probability of each token after the first, from all logits."""
    x = np.asarray(logits(model, tokens, **options), np.float64)[:, :-1]
    top = x.max(-1, keepdims=True)
    log_p = x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, np.asarray(tokens)[:, 1:, None], -1)[..., 0]


def test_hidden_states_equal_a_loop_over_layers(model):
    tokens = random_tokens((2, 9))
    states = zoo.hidden_states(model, tokens)
    assert len(states) == SIZES["layers"] + 1

    @eqx.filter_jit
    def loop_over_layers(model, tokens):
        x = model.embedding(tokens)
        states = [x]
        for segment in model.stack.segments:
            for repeat in range(segment.local_repeats):
                for block in segment.blocks:
                    block = jax.tree.map(lambda a, i=repeat: a[i], block)
                    x = x + block.mixer(block.mixer_norm(x), TokenInfo())[0]
                    x = x + block.ffn(block.ffn_norm(x))[0]
                    states.append(x)
        return [*states[:-1], model.norm(states[-1])]

    for state, expected in zip(states, loop_over_layers(model, tokens), strict=True):
        assert state.shape == (2, 9, SIZES["embed"])
        assert np.allclose(state, expected, atol=1e-5)
    assert np.allclose(model.logits(states[-1]), logits(model, tokens), atol=1e-4)
    assert np.array_equal(states[0], model.embedding(tokens))
    unrolled = swap_stack(model, lambda stack: stack.unstack())
    for state, other in zip(states, zoo.hidden_states(unrolled, tokens), strict=True):
        assert np.allclose(state, other, atol=1e-5)


def test_hidden_states_of_an_edited_model_have_the_edits(model):
    tokens = random_tokens((2, 9))
    vector, rows = jax.random.normal(jax.random.key(5), (16,)), jax.random.normal(jax.random.key(6), (3, 16))
    edits = {
        "embedding": lambda x: 2 * x,
        "layers.1": (jnp.add, vector),
        "layers.*.attention.out": (jnp.add, rows),
        "norm": lambda x: -x,
    }
    steered = zoo.patch(model, edits)

    @eqx.filter_jit
    def loop_over_layers(model, tokens):
        x = 2 * model.embedding(tokens)
        states = [x]
        for layer, block in enumerate(model.stack.iter_blocks()):
            x = x + block.mixer(block.mixer_norm(x), TokenInfo())[0] + rows[layer]
            x = x + block.ffn(block.ffn_norm(x))[0] + (vector if layer == 1 else 0)
            states.append(x)
        return [*states[:-1], -model.norm(x)]

    states = zoo.hidden_states(steered, tokens)
    for state, expected in zip(states, loop_over_layers(model, tokens), strict=True):
        np.testing.assert_allclose(state, expected, atol=1e-5)
    np.testing.assert_allclose(model.logits(states[-1]), logits(steered, tokens), atol=1e-4)


@pytest.mark.ci
def test_hidden_states_ignore_padding_and_other_documents(model):
    tokens, mask = random_tokens((2, 8)), np.array([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8], bool)
    padded, unpadded = (
        zoo.hidden_states(model, tokens, mask=jnp.asarray(mask)),
        zoo.hidden_states(model, tokens[:1, 3:]),
    )
    for state, expected in zip(padded, unpadded, strict=True):
        assert np.allclose(state[0, 3:], expected[0], atol=1e-5)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2]] * 2)
    packed = zoo.hidden_states(model, tokens, segment_ids=segments)
    for state, expected in zip(packed, unpadded, strict=True):
        assert np.allclose(state[0, 3:], expected[0], atol=1e-5)


def test_hidden_states_need_a_stack_with_separate_blocks(model):
    class Opaque(AbstractStack):
        def __call__(self, hidden, info, states=None):
            return Hidden(hidden.x), states

        def init_state(self, batch, length, dtype=jnp.float32):
            return ()

    with pytest.raises(TypeError, match="and Opaque cannot be taken apart"):
        zoo.hidden_states(swap_stack(model, lambda stack: Opaque()), random_tokens((1, 3)))


@pytest.mark.ci
@given(seed=st.integers(0, 99), chunk=st.sampled_from([1, 4, 18, 1024]))
def test_score_equals_log_probs(model, seed, chunk):
    tokens = random_tokens((2, 10), seed)
    found = score(model, tokens, chunk=chunk)
    assert found.shape == (2, 9) and found.dtype == jnp.float32
    assert np.allclose(found, score_numpy(model, tokens), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tied": True}, {"tied": True, "soft_cap": 2.0}, {"windows": (2,)}])
def test_score_of_tied_capped_and_windowed_models(options):
    model = zoo.models.Transformer(**SIZES, **options, key=KEY)
    model = eqx.tree_at(lambda m: m.embedding.weight, model, 5 * model.embedding.weight)
    tokens = random_tokens((2, 10))
    assert np.allclose(score(model, tokens, chunk=5), score_numpy(model, tokens), atol=1e-5)


@given(padding=st.integers(0, 8), seed=st.integers(0, 99), side=st.sampled_from(["left", "right"]))
def test_score_of_padding_is_zero(model, padding, seed, side):
    """The first token after padding scores 0 too, since no token precedes it."""
    tokens, index = random_tokens((2, 10), seed), np.arange(10)
    real = index >= padding if side == "left" else index < 10 - padding
    mask = jnp.asarray(np.stack([real, index >= 0]))
    found = np.asarray(score(model, tokens, mask=mask, chunk=4))
    unpadded = jnp.roll(tokens, -padding, 1) if side == "left" else tokens
    expected = score_numpy(model, unpadded)[0, : 9 - padding]
    assert np.allclose(found[0, padding:] if side == "left" else found[0, : 9 - padding], expected, atol=1e-5)
    assert (found[0, :padding] == 0).all() if side == "left" else (found[0, 9 - padding :] == 0).all()
    assert np.allclose(found[1], score_numpy(model, tokens)[1], atol=1e-5)


@given(cut=st.integers(1, 9), seed=st.integers(0, 99))
def test_score_packed_equals_separate(model, cut, seed):
    tokens = random_tokens((2, 10), seed)
    segments = jnp.where(jnp.arange(10) < cut, 3, 7) * jnp.ones((2, 1), int)
    found = np.asarray(score(model, tokens, segment_ids=segments, chunk=4))
    second = score_numpy(model, jnp.roll(tokens, -cut, 1))
    assert np.allclose(found[:, : cut - 1], score_numpy(model, tokens)[:, : cut - 1], atol=1e-5)
    assert (found[:, cut - 1] == 0).all(), "no token precedes the first of a document"
    assert np.allclose(found[:, cut:], second[:, : 9 - cut], atol=1e-5)


@pytest.mark.ci
def test_score_gradient_equals_that_of_all_logits(model):
    tokens = random_tokens((2, 10))
    weights = jax.random.normal(KEY, (2, 9))

    @eqx.filter_jit
    @eqx.filter_grad
    def in_chunks(model):
        return (weights * zoo.score(model, tokens, chunk=4)).sum()

    @eqx.filter_jit
    @eqx.filter_grad
    def at_once(model):
        log_p = jax.nn.log_softmax(model(tokens)[:, :-1])
        return (weights * jnp.take_along_axis(log_p, tokens[:, 1:, None], 2)[..., 0]).sum()

    gradients, expected = in_chunks(model), at_once(model)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 1, "tensor": 8},
        {"data": 2, "context": 2, "tensor": 2},
    ],
)
def test_score_and_hidden_states_are_the_same_on_a_mesh(sizes):
    model = zoo.models.Transformer(**SIZES | {"heads": 8}, tied=False, key=KEY)
    tokens, mesh = random_tokens((4, 10)), zoo.make_mesh(**sizes)
    segments = jnp.asarray([[1] * 4 + [2] * 6] * 4)
    packed = segments, pack_positions(segments)
    options = dict(zip(("segment_ids", "positions"), packed, strict=True))
    placed = zoo.place(model, mesh)

    def scores(model, tokens, segment_ids, positions):
        return zoo.score(model, tokens, segment_ids=segment_ids, positions=positions, chunk=7)

    found = zoo.spmd(scores, mesh, out="batch new")(placed, tokens, *packed)
    assert np.allclose(found, score(model, tokens, **options), atol=1e-5)

    def last(model, tokens, segment_ids, positions):
        return zoo.hidden_states(model, tokens, segment_ids=segment_ids, positions=positions)[-1]

    found = zoo.spmd(last, mesh, out="batch seq embed")(placed, tokens, *packed)
    assert np.allclose(found, zoo.hidden_states(model, tokens, **options)[-1], atol=1e-5)


@pytest.mark.slow
def test_score_gradient_is_the_same_on_a_sharded_sequence(model):
    tokens, mesh = random_tokens((2, 16)), zoo.make_mesh(data=2, context=4)

    def loss_fn(model, batch):
        scores = zoo.score(model, batch["tokens"])
        return -(scores**2).sum(), jnp.float32(scores.size)

    loss, gradients = zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), {"tokens": tokens})
    mean = lambda model: -(zoo.score(model, tokens) ** 2).mean()
    expected, of_model = eqx.filter_jit(eqx.filter_value_and_grad(mean))(model)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_model), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_score_refuses_bad_arguments(model):
    with pytest.raises(ValueError, match="a row needs 2 or more"):
        zoo.score(model, random_tokens((2, 1)))
    with pytest.raises(ValueError, match="chunk is a number of tokens, at least 1, not 0"):
        zoo.score(model, random_tokens((1, 4)), chunk=0)
    with pytest.raises(ValueError, match=r"expected at least 1 row and 1 token, got shape \(0, 4\)"):
        zoo.score(model, random_tokens((0, 4)))
    for call in (zoo.score, zoo.hidden_states):
        with pytest.raises(ValueError, match="pass mask alone"):
            call(model, random_tokens((1, 4)), mask=jnp.ones((1, 4), bool), segment_ids=jnp.ones((1, 4), int))


def test_score_of_padded_packed_rows_is_zero_there():
    """Padding is False in a mask, and 0 in segment ids: by both the sum over a row is that of its documents."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 32)
    segment_ids = jnp.array([[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 2, 2, 2, 2, 0]])
    scores = zoo.score(model, tokens, segment_ids=segment_ids)
    np.testing.assert_array_equal(scores[:, 4:][segment_ids[:, 5:] == 0], 0)
    by_mask = zoo.score(model, tokens[:1], mask=segment_ids[:1] > 0)
    np.testing.assert_allclose(scores[:1], by_mask, atol=1e-6)
    documents = [zoo.score(model, tokens[1:, :3]), zoo.score(model, tokens[1:, 3:7])]
    np.testing.assert_allclose(scores[1].sum(), sum(x.sum() for x in documents), rtol=1e-5)
