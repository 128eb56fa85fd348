"""What a decoder promises: no look ahead, packed equals separate, padding is nothing, a cache changes nothing."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from zoo.layers import TokenInfo
from zoo.models import Hidden, find_patterns, pack_positions, swap_stack
from zoo.ops.attention import fused_attention, reference_attention

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(**SIZES, windows=(4, None), qk_norm=True, key=KEY)


def text(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, SIZES["vocab"])


def test_nothing_flows_from_later_tokens(model):
    @eqx.filter_jit
    def influence(model, tokens):
        """d(logits at i) / d(embedding of token j), summed in magnitude: [i, j]."""

        def run(x):
            stream, _ = model.stack(Hidden(x), TokenInfo())
            return model.logits(stream.x)[0].sum(-1)

        return jnp.abs(jax.jacrev(run)(model.embedding(tokens))[:, 0]).sum(-1)

    flow = influence(model, text((1, 9)))
    assert (jnp.triu(flow, 1) == 0).all()
    assert (jnp.diag(flow) > 0).all()


@given(first=st.integers(1, 9), seed=st.integers(0, 99))
def test_packed_equals_separate(model, first, seed):
    tokens = text((2, 10), seed)
    segment_ids = jnp.where(jnp.arange(10) < first, 3, 7) * jnp.ones((2, 1), int)
    packed = run(model, tokens, segment_ids=segment_ids)
    alone = run(model, jnp.roll(tokens, -first, 1))  # the second document, as far as it goes
    assert jnp.allclose(packed[:, first:], alone[:, : 10 - first], atol=1e-5)
    assert jnp.allclose(packed[:, :first], run(model, tokens)[:, :first], atol=1e-5)


@given(left=st.integers(0, 6), seed=st.integers(0, 99), side=st.sampled_from(["left", "right"]))
def test_padding_is_nothing(model, left, seed, side):
    tokens = text((2, 10), seed)
    index = jnp.arange(10)
    mask = jnp.stack([index >= left if side == "left" else index < 10 - left, index >= 0])
    short = jnp.roll(tokens, -left, 1) if side == "left" else tokens
    padded, alone = run(model, tokens, mask=mask), run(model, short)
    real = padded[0, left:] if side == "left" else padded[0, : 10 - left]
    assert jnp.allclose(real, alone[0, : 10 - left], atol=1e-5)
    assert jnp.allclose(padded[1], run(model, tokens)[1], atol=1e-5)


@eqx.filter_jit
def run(model, tokens, **options):
    return model(tokens, **options)


def test_forms_of_attention_agree(model):
    tokens = text((2, 10))
    for form in (reference_attention, fused_attention):
        other = zoo.models.Transformer(**SIZES, windows=(4, None), qk_norm=True, implementation=form, key=KEY)
        assert jnp.allclose(run(other, tokens), run(model, tokens), atol=1e-5)


def test_greedy_generation_is_that_of_whole_passes(model):
    """Prompts of unlike length, padded on the left; more tokens than the windows hold."""
    tokens, mask = text((2, 6)), jnp.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)
    new = zoo.generate(model, tokens, max_new_tokens=8, mask=mask)
    for row, prompt in zip(new, (tokens[:1, 2:], tokens[1:]), strict=True):
        whole = jnp.concatenate([prompt, row[None]], 1)
        logits = run(model, jnp.pad(whole, ((0, 0), (0, 14 - whole.shape[1]))))[0]
        assert (logits.argmax(-1)[prompt.shape[1] - 1 : whole.shape[1] - 1] == row).all()


def test_drawing_needs_a_key_and_follows_it(model):
    tokens = text((1, 6))
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


def test_caches_hold_no_more_than_their_window(model):
    states = model.init_state(2, 50)
    assert [state.positions.shape for state in states] == [(2, 4), (2, 50), (2, 4)]


def test_what_a_cache_cannot_do_raises(model):
    with pytest.raises(ValueError, match="with a cache the place of each token is not known"):
        model.hidden(text((1, 3)), TokenInfo(), model.init_state(1, 5))


def test_layers_one_by_one_are_the_scanned_ones(model):
    tokens = text((2, 7))
    one_by_one = swap_stack(model, lambda stack: stack.unstack())
    assert jnp.allclose(run(one_by_one, tokens), run(model, tokens), atol=1e-5)
    assert zoo.count(one_by_one) == zoo.count(model)
    with pytest.raises(ValueError, match="Embedding has 0 stacks"):
        swap_stack(model.embedding, lambda stack: stack)


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ("a" * 12, [(1, 12)]),
        ("aab" * 3, [(3, 3)]),
        ("lllllg" * 10 + "ll", [(6, 10), (1, 2)]),
        ("abbb", [(1, 1), (1, 3)]),
        ("a", [(1, 1)]),
    ],
)
def test_layers_are_cut_into_few_patterns(kinds, expected):
    assert sorted(find_patterns(kinds)) == sorted(expected)
    assert sum(period * repeats for period, repeats in find_patterns(kinds)) == len(kinds)


def test_the_cut_does_not_change_the_numbers():
    one = zoo.models.Transformer(**SIZES, windows=(4, 4), key=KEY)
    other = zoo.models.Transformer(**SIZES, windows=(4,), key=KEY)
    assert eqx.tree_equal(one, other)


def test_dropout_only_with_a_key():
    model = zoo.models.Transformer(**SIZES, dropout=0.5, key=KEY)
    tokens = text((2, 7))
    assert jnp.array_equal(run(model, tokens), run(zoo.models.Transformer(**SIZES, key=KEY), tokens))
    a, b = run(model, tokens, key=KEY), run(model, tokens, key=jax.random.key(1))
    assert not jnp.allclose(a, b)
    assert jnp.array_equal(a, run(model, tokens, key=jax.random.split(KEY, 2)))


def test_initial_logits_are_of_the_order_of_one_and_depth_does_not_matter():
    for layers in (1, 8):
        model = zoo.models.Transformer(**{**SIZES, "embed": 64, "layers": layers}, tied=False, key=KEY)
        assert 0.5 < run(model, text((2, 16))).std() < 2


def test_positions_of_packed_documents_start_anew():
    assert pack_positions(jnp.array([[1, 1, 1, 2, 2, 0, 0]])).tolist() == [[0, 1, 2, 0, 1, 0, 1]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_heads": 3}, "4 heads do not share out over 3 kv_heads"),
        ({"heads": 3, "kv_heads": 3}, "embed=16 does not share out over 3 heads"),
        ({"windows": (0,)}, "a window holds at least 1 token"),
        ({"layers": 0}, "at least 1 layer"),
        ({"dropout": 1.0}, "at least 0 and less than 1"),
    ],
)
def test_bad_sizes_raise(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.models.Transformer(**SIZES | options, key=KEY)


def test_mask_and_segments_say_the_same_thing_twice(model):
    with pytest.raises(ValueError, match="pass mask alone"):
        model(text((1, 4)), mask=jnp.ones((1, 4), bool), segment_ids=jnp.ones((1, 4), int))


def test_ids_outside_the_vocabulary_give_nan_and_do_not_pass_for_tokens(model):
    assert jnp.isnan(model.embedding(jnp.array([[32, -1]]))).all()
