"""A text that was read before equals one that is read in one call, for every kind of state."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Attention, GatedDeltaNet, LatentAttention, Mamba2
from zoo.ops.rotary import LongRopeScaling, Rotary

VOCAB, LENGTH = 64, 64
MIXERS = {
    "window": [partial(Attention, heads=4, kv_heads=2, rotary=Rotary(4), window=5), partial(Attention, heads=2)],
    "latents": [partial(LatentAttention, heads=2, latent=6, head_dim=4, value_dim=3, rotary=Rotary(2))],
    "recurrent": [partial(GatedDeltaNet, heads=2), partial(Mamba2, heads=4, head_dim=8, state_dim=4)],
}
TURNS = [np.array([9, 6, 1]), np.array([3, 5, 1]), np.array([1, 4, 12])]


def make_model(name="window", **options):
    make = partial(zoo.models.Hybrid, vocab=VOCAB, embed=16, layers=2, pattern=MIXERS[name], key=jax.random.key(0))
    return jax.tree.map(lambda x: 3 * x, make(**options))


def draw_turn(number):
    """Tokens of three rows, and their mask: padding is on the left."""
    lengths = TURNS[number]
    tokens = np.random.default_rng(number).integers(0, VOCAB, (3, lengths.max()))
    return jnp.asarray(tokens), jnp.asarray(np.arange(lengths.max()) >= (lengths.max() - lengths)[:, None])


def pad_texts(texts):
    longest = max(map(len, texts))
    tokens = np.array([[0] * (longest - len(text)) + text for text in texts])
    mask = np.arange(longest) >= np.array([longest - len(text) for text in texts])[:, None]
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def append(texts, tokens, mask=None):
    """Append the real tokens of each row."""
    is_real = np.asarray(tokens >= 0 if mask is None else mask)
    rows = zip(texts, np.asarray(tokens).tolist(), is_real.tolist(), strict=True)
    return [text + [token for token, real in zip(row, kept, strict=True) if real] for text, row, kept in rows]


@pytest.mark.one_case
@pytest.mark.parametrize("name", MIXERS)
def test_ragged_turns_equal_a_fresh_call(name):
    """Turns of different lengths, of rows that end at different tokens: windows, latents and recurrences."""
    model = make_model(name)
    texts = [[], [], []]
    prefix = None
    options = {"max_new_tokens": 6, "repetition_penalty": 1.1, "stop_tokens": (3, 7, 20, 33, 41, 55)}
    ends = set()
    for number in range(len(TURNS)):
        tokens, mask = draw_turn(number)
        texts = append(texts, tokens, mask)
        length = LENGTH if prefix is None else None
        found = zoo.generate(model, tokens, mask=mask, prefix=prefix, length=length, details=True, **options)
        expected = zoo.generate(model, **pad_texts(texts), length=LENGTH, **options)
        np.testing.assert_array_equal(found.tokens, expected)
        ends |= set((np.asarray(expected) >= 0).sum(1).tolist())
        texts = append(texts, found.tokens)
        prefix = found.prefix
        assert prefix.lengths.tolist() == list(map(len, texts))
        assert append([[], [], []], prefix.text[: prefix.rows]) == texts
    assert len(ends) > 1


def test_long_prompts_are_read_several_pieces_at_once(monkeypatch):
    """Pieces of 8 tokens, 8 at once: of 101 tokens in a cache for 128, five pieces come before the long one."""
    buckets = sys.modules["zoo.generate.buckets"]
    monkeypatch.setattr(buckets, "_MAX_PIECE", 8)
    mixers = [*MIXERS["window"], MIXERS["recurrent"][0]]
    model = zoo.models.Hybrid(vocab=VOCAB, embed=16, layers=3, pattern=mixers, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 101), 0, VOCAB)
    mask = jnp.arange(101) >= jnp.array([0, 13, 70])[:, None]
    reads = []
    hidden = zoo.models.Decoder.hidden

    def record(self, tokens, *args):
        reads.append(tokens.shape[1])
        return hidden(self, tokens, *args)

    def read(most):
        monkeypatch.setattr(buckets, "_MOST_PIECES_AT_ONCE", most)
        jax.clear_caches()  # programs do not depend on these constants
        return zoo.prefill(model, tokens, mask=mask, length=128)

    expected = read(1)
    monkeypatch.setattr(zoo.models.Decoder, "hidden", record)
    found = read(8)
    assert set(reads) == {8, 64}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("name", [*MIXERS][:1])
def test_one_prefix_serves_many_rows(name):
    model = make_model(name)
    tokens, mask = draw_turn(0)
    system = jnp.asarray(np.random.default_rng(9).integers(0, VOCAB, (1, 20)))
    prefix = zoo.prefill(model, system[:, 8:], prefix=zoo.prefill(model, system[:, :8], length=LENGTH))
    texts = append([system[0].tolist()] * 3, tokens, mask)
    expected = zoo.generate(model, **pad_texts(texts), max_new_tokens=5)
    for _ in range(2):  # a prefix is not used up
        found = zoo.generate(model, tokens, mask=mask, prefix=prefix, max_new_tokens=5)
        np.testing.assert_array_equal(found, expected)
    assert (prefix.rows, prefix.length, prefix.lengths.tolist()) == (1, LENGTH, [20])


@pytest.mark.ci
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "context": 2, "tensor": 2},
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_prefixes_on_a_mesh(axes):
    """A prefix of one row for three, its continuation for six samples, and theirs."""
    options = {"max_new_tokens": 5, "temperature": 1.0, "key": jax.random.key(1)}
    tokens, mask = draw_turn(0)

    def run(model, mesh):
        prefix = zoo.prefill(model, tokens[:1], length=LENGTH, mesh=mesh)
        first = zoo.generate(
            model, tokens, mask=mask, prefix=prefix, samples=2, mesh=mesh, details=True, stop_tokens=(9,), **options
        )
        turn = jnp.repeat(tokens, 2, axis=0)
        second = zoo.generate(model, turn, prefix=first.prefix, mesh=mesh, details=True, **options)
        return [*first[:3], *second[:3]]

    model = make_model()
    mesh = zoo.make_mesh(**axes)
    for found, expected in zip(run(zoo.place(model, mesh), mesh), run(model, None), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_prefix_of_longrope_has_the_frequencies_of_its_length():
    scaling = LongRopeScaling((1.0, 1.5), (4.0, 9.0), original_length=12, factor=4.0)
    model = zoo.models.Transformer(
        vocab=VOCAB, embed=16, layers=1, heads=2, mlp=16, rotary=Rotary(4, scaling=scaling), key=jax.random.key(0)
    )
    tokens, _ = draw_turn(0)
    prefix = zoo.prefill(model, tokens[:, :5], length=40)
    found = zoo.generate(model, tokens[:, 5:], prefix=prefix, max_new_tokens=6)
    np.testing.assert_array_equal(found, zoo.generate(model, tokens, max_new_tokens=6, length=40))
    with pytest.raises(NotImplementedError, match="LongRoPE reads the whole text again"):
        zoo.generate(model, tokens, prefix=zoo.prefill(model, tokens), max_new_tokens=2)
    assert zoo.generate(model, tokens, max_new_tokens=2, details=True).prefix is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": jnp.zeros((2, 4), int)}, "a prefix of 3 rows is followed by as many rows of tokens, not 2"),
        ({"length": 99}, "length=99: a prefix has its capacity, 20. Give length to zoo.prefill"),
        ({"max_new_tokens": 8}, "room for 20 tokens, and 9 of its own, 9 that follow and 8 new ones are 26"),
    ],
    ids=str,
)
def test_a_prefix_that_does_not_fit_raises(options, message):
    model = make_model()
    tokens, mask = draw_turn(0)
    prefix = zoo.prefill(model, tokens, mask=mask, length=20)
    with pytest.raises(ValueError, match=message):
        zoo.generate(model, **{"tokens": tokens, "prefix": prefix, "max_new_tokens": 2} | options)


def test_prefill_raises_as_generate_does(no_type_checks):
    model = make_model()
    tokens, mask = draw_turn(0)
    with pytest.raises(ValueError, match="length=4 does not hold 9 tokens"):
        zoo.prefill(model, tokens, length=4)
    with pytest.raises(ValueError, match="padded on the left"):
        zoo.prefill(model, tokens, mask=mask[:, ::-1])
    with pytest.raises(TypeError, match="text is generated by a Decoder, not by dict"):
        zoo.prefill({}, tokens)
