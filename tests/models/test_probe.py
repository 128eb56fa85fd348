"""What a model makes of a text: states between layers by a loop of one's own, scores by numpy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from zoo.layers import TokenInfo
from zoo.models import Hidden, swap_stack

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(**SIZES, windows=(4, None), qk_norm=True, tied=False, key=KEY)


def text(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, SIZES["vocab"])


@eqx.filter_jit
def logits(model, tokens, **options):
    return model(tokens, **options)


score = eqx.filter_jit(zoo.score)


def by_numpy(model, tokens, **options):
    """log p of each token after the first, from the logits of the whole model."""
    x = np.asarray(logits(model, tokens, **options), np.float64)[:, :-1]
    top = x.max(-1, keepdims=True)
    log_p = x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, np.asarray(tokens)[:, 1:, None], -1)[..., 0]


def test_hidden_states_are_those_of_a_loop(model):
    tokens = text((2, 9))
    states = zoo.hidden_states(model, tokens)
    assert len(states) == SIZES["layers"] + 1

    @eqx.filter_jit
    def by_hand(model, tokens):
        x = model.embedding(tokens)
        found = [x]
        for segment in model.stack.segments:
            for repeat in range(segment.local_repeats):
                for block in segment.blocks:
                    block = jax.tree.map(lambda a, i=repeat: a[i], block)
                    x = x + block.mixer(block.mixer_norm(x), TokenInfo())[0]
                    x = x + block.ffn(block.ffn_norm(x))[0]
                    found.append(x)
        return [*found[:-1], model.norm(found[-1])]

    for state, expected in zip(states, by_hand(model, tokens), strict=True):
        assert state.shape == (2, 9, SIZES["embed"])
        assert np.allclose(state, expected, atol=1e-5)
    assert np.allclose(model.logits(states[-1]), logits(model, tokens), atol=1e-4)
    assert np.array_equal(states[0], model.embedding(tokens))
    one_by_one = swap_stack(model, lambda stack: stack.unstack())
    for state, other in zip(states, zoo.hidden_states(one_by_one, tokens), strict=True):
        assert np.allclose(state, other, atol=1e-5)


def test_hidden_states_see_padding_and_documents_as_the_model_does(model):
    tokens, mask = text((2, 8)), np.array([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8], bool)
    padded, alone = zoo.hidden_states(model, tokens, mask=jnp.asarray(mask)), zoo.hidden_states(model, tokens[:1, 3:])
    for state, expected in zip(padded, alone, strict=True):
        assert np.allclose(state[0, 3:], expected[0], atol=1e-5)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2]] * 2)
    packed = zoo.hidden_states(model, tokens, segment_ids=segments)
    for state, expected in zip(packed, alone, strict=True):
        assert np.allclose(state[0, 3:], expected[0], atol=1e-5)


def test_hidden_states_need_layers_that_can_be_taken_apart(model):
    class Whole(zoo.models.AbstractStack):
        def __call__(self, stream, info, states=None):
            return Hidden(stream.x), states

        def init_state(self, batch, length, dtype=jnp.float32):
            return ()

    with pytest.raises(TypeError, match="a Whole cannot be taken apart"):
        zoo.hidden_states(swap_stack(model, lambda stack: Whole()), text((1, 3)))


@given(seed=st.integers(0, 99), chunk=st.sampled_from([1, 4, 18, 1024]))
def test_scores_are_log_probabilities(model, seed, chunk):
    tokens = text((2, 10), seed)
    found = score(model, tokens, chunk=chunk)
    assert found.shape == (2, 9) and found.dtype == jnp.float32
    assert np.allclose(found, by_numpy(model, tokens), atol=1e-5)


@pytest.mark.parametrize("options", [{"tied": True}, {"tied": True, "soft_cap": 2.0}, {"windows": (2,)}])
def test_scores_of_other_models(options):
    model = zoo.models.Transformer(**SIZES, **options, key=KEY)
    model = eqx.tree_at(lambda m: m.embedding.weight, model, 5 * model.embedding.weight)
    tokens = text((2, 10))
    assert np.allclose(score(model, tokens, chunk=5), by_numpy(model, tokens), atol=1e-5)


@given(left=st.integers(0, 8), seed=st.integers(0, 99), side=st.sampled_from(["left", "right"]))
def test_padding_scores_nothing(model, left, seed, side):
    """The first real token after padding has none either: nothing real stands before it."""
    tokens, index = text((2, 10), seed), np.arange(10)
    real = index >= left if side == "left" else index < 10 - left
    mask = jnp.asarray(np.stack([real, index >= 0]))
    found = np.asarray(score(model, tokens, mask=mask, chunk=4))
    short = jnp.roll(tokens, -left, 1) if side == "left" else tokens
    expected = by_numpy(model, short)[0, : 9 - left]
    assert np.allclose(found[0, left:] if side == "left" else found[0, : 9 - left], expected, atol=1e-5)
    assert (found[0, :left] == 0).all() if side == "left" else (found[0, 9 - left :] == 0).all()
    assert np.allclose(found[1], by_numpy(model, tokens)[1], atol=1e-5)


@given(cut=st.integers(1, 9), seed=st.integers(0, 99))
def test_packed_documents_score_as_separate_ones(model, cut, seed):
    tokens = text((2, 10), seed)
    segments = jnp.where(jnp.arange(10) < cut, 3, 7) * jnp.ones((2, 1), int)
    found = np.asarray(score(model, tokens, segment_ids=segments, chunk=4))
    alone = by_numpy(model, jnp.roll(tokens, -cut, 1))
    assert np.allclose(found[:, : cut - 1], by_numpy(model, tokens)[:, : cut - 1], atol=1e-5)
    assert (found[:, cut - 1] == 0).all(), "the first token of a document follows nothing"
    assert np.allclose(found[:, cut:], alone[:, : 9 - cut], atol=1e-5)


def test_the_gradient_is_that_of_all_logits_at_once(model):
    tokens = text((2, 10))
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

    one, other = in_chunks(model), at_once(model)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "tensor": 8}])
def test_scores_and_states_on_a_mesh_are_those_of_one_device(sizes):
    model = zoo.models.Transformer(**SIZES | {"heads": 8}, tied=False, key=KEY)
    tokens, mesh = text((4, 10)), zoo.make_mesh(**sizes)
    segments = jnp.asarray([[1] * 4 + [2] * 6] * 4)
    packed = segments, zoo.models.pack_positions(segments)
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


def test_bad_calls_are_told(model):
    with pytest.raises(ValueError, match="a row needs 2 or more"):
        zoo.score(model, text((2, 1)))
    for call in (zoo.score, zoo.hidden_states):
        with pytest.raises(ValueError, match="pass mask alone"):
            call(model, text((1, 4)), mask=jnp.ones((1, 4), bool), segment_ids=jnp.ones((1, 4), int))
