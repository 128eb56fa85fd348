"""Memory of n-grams: hashes against whole numbers, boundaries, states, meshes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize
from zoo.layers import AbstractMixer, TokenInfo
from zoo.layers.ngram import NGramEmbedding, NGramMemory
from zoo.layers.recurrent.context import RecurrenceContext
from zoo.ops.ngram import hash_ngrams, list_primes, make_multipliers
from zoo.tools.testing import check_mixer

VOCAB = 50
END = 3
SIZES = {"size": 11, "boundary": END, "heads": 2, "parts": 2, "multiple": 8}
MEMORY = partial(NGramMemory, 8, VOCAB, **SIZES, streams=2, memory=12, conv_width=3)


@pytest.mark.parametrize("vocab", [97, 248_320, 2**24])
def test_hashes_equal_those_of_whole_numbers(vocab):
    draw = np.random.default_rng(0)
    multipliers = make_multipliers(vocab, 3, seed=int(draw.integers(2**31)), number=1)
    assert all(factor % 2 == 1 and factor * (vocab - 1) < 2**63 for factor in multipliers)
    tokens = np.append(draw.integers(0, vocab, (50, 3)), [[vocab - 1] * 3], axis=0)
    sizes = [[31, 20_000_003], [7, 2**31 - 1]]
    expected = []
    for row in tokens.tolist():
        products = [token * factor for token, factor in zip(row, multipliers, strict=True)]
        bigram = products[0] ^ products[1]
        trigram = bigram ^ products[2]
        expected.append([bigram % 31, bigram % 20_000_003, trigram % 7, trigram % (2**31 - 1)])
    np.testing.assert_array_equal(hash_ngrams(jnp.asarray(tokens), multipliers, sizes), expected)


def test_primes():
    assert list_primes(0, 5) == (2, 3, 5, 7, 11)
    assert list_primes(20_000_000, 2) == (20_000_003, 20_000_023)


def embed(embedding, tokens, info=None, state=None):
    info = TokenInfo() if info is None else info
    tokens = jnp.asarray(tokens)
    context = RecurrenceContext.from_info(jnp.zeros((*tokens.shape, 1)), info, state)
    return embedding(tokens, context, state)


@pytest.fixture(scope="module")
def embedding():
    return NGramEmbedding(VOCAB, 12, **SIZES, key=jax.random.key(0))


def look_up(embedding, text, t):
    """Return the embedding of the n-grams that end in token t, by the definition."""
    earlier = [END] * 2
    for lag in (1, 2):
        if t - lag < 0 or END in text[t - lag : t]:
            break
        earlier[lag - 1] = text[t - lag]
    table = np.asarray(embedding.tables.weight).reshape(-1, 3)
    products = [token * m for token, m in zip([text[t], *earlier], embedding.multipliers, strict=True)]
    rows = []
    first = 0
    hashes = products[0] ^ products[1], products[0] ^ products[1] ^ products[2]
    for sizes, value in zip(embedding.sizes, hashes, strict=True):
        for size in sizes:
            rows.append(table[first + value % size])
            first += size
    return np.concatenate(rows)


def test_embedding_equals_its_definition(embedding):
    """Also after the ends of texts, two of them in a row, and of the end itself."""
    text = [7, 7, END, 9, END, END, 4, 5, 6, 7, 7]
    found, _ = embed(embedding, [text])
    np.testing.assert_allclose(found[0], [look_up(embedding, text, t) for t in range(len(text))])


def test_texts_of_a_packed_row_and_padding_do_not_meet(embedding):
    texts = [5, 6, 7], [8, 9, 10, 11]
    row = [0, *texts[0], *texts[1]]
    found, _ = embed(embedding, [row], TokenInfo(segment_ids=jnp.array([[0, 1, 1, 1, 2, 2, 2, 2]])))
    expected = [look_up(embedding, text, t) for text in texts for t in range(len(text))]
    np.testing.assert_allclose(found[0, 1:], expected)


def test_a_state_continues_a_text(embedding):
    """With padding to the left of one row, and ids that bfloat16 would round."""
    text = [41, 43, END, 47, 49, 45, 44]
    rows = [text[:3], [0, 0, 41]]
    state = embedding.init_state(2)
    _, state = embed(embedding, rows, TokenInfo(positions=jnp.array([[0, 1, 2], [-1, -1, 0]])), state)
    found, state = embed(
        embedding, [text[3:], text[1:5]], TokenInfo(positions=jnp.array([[3, 4, 5, 6], [1, 2, 3, 4]])), state
    )
    assert zoo.cast(state, jnp.bfloat16).tokens.dtype == jnp.int32
    np.testing.assert_array_equal(state.tokens, [[45, 44], [47, 49]])
    np.testing.assert_allclose(found[0], [look_up(embedding, text, t) for t in range(3, 7)])
    np.testing.assert_allclose(found[1], [look_up(embedding, text, t) for t in range(1, 5)])


class MemoryOfFeatures(AbstractMixer):
    """A memory whose ids follow from the residual stream, so that it is a mixer like any other."""

    shards_sequence = True

    memory: NGramMemory

    def __init__(self, *, key):
        self.memory = MEMORY(key=key)

    def __call__(self, x, info, state=None):
        ids = jax.lax.stop_gradient(jnp.floor(10 * jnp.abs(x[..., 0]))).astype(jnp.int32) % VOCAB
        memory = eqx.tree_at(lambda x: x.tokens, self.memory, ids, is_leaf=lambda x: x is None)
        return memory(x, info, state)

    def init_state(self, batch, length, dtype=jnp.float32):
        return self.memory.init_state(batch, length, dtype)


@pytest.mark.ci
def test_memory_keeps_the_promises_of_a_mixer():
    check_mixer(MemoryOfFeatures, meshes=[zoo.make_mesh(data=2, tensor=2, fsdp=2), zoo.make_mesh(data=4, context=2)])


def test_a_new_memory_convolves_nothing():
    assert not MEMORY(key=jax.random.key(0)).convolution.weight.any()


def test_memory_equals_its_formula():
    memory = randomize(lambda key: MEMORY(key=key))
    x = activations(1, 9, 16)
    tokens = jnp.array([[4, 5, 6, 7, 4, 5, 6, 8, 9]])
    found, _ = eqx.tree_at(lambda x: x.tokens, memory, tokens, is_leaf=lambda x: x is None)(x, TokenInfo())
    embedded, _ = embed(memory.embedding, tokens)
    split = lambda x: np.asarray(x, np.float64).reshape(9, 2, 8)
    norm = lambda norm, x: split(norm(jnp.asarray(x.reshape(1, 9, 16), jnp.float32)))
    query, key = split(memory.query_norm(x)), split(memory.key_norm(memory.key(embedded)))
    gate = (query * key).sum(-1) / 8**0.5
    gated = (
        1
        / (1 + np.exp(-np.sign(gate) * np.abs(gate) ** 0.5))[..., None]
        * np.asarray(memory.value(embedded))[0][:, None]
    )
    normed = norm(memory.conv_norm, gated)
    weight = np.asarray(memory.convolution.weight).reshape(2, 8, 3)
    mixed = np.zeros_like(gated)
    for t in range(9):
        for tap in range(3):
            if t - 3 * tap >= 0:
                mixed[t] += weight[..., 2 - tap] * normed[t - 3 * tap]
    np.testing.assert_allclose(split(found), gated + mixed / (1 + np.exp(-mixed)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "12 features do not divide evenly over 5 hashes"),
        ({"order": 1}, "n-grams up to 1"),
        ({"boundary": VOCAB}, "boundary 50 is an id below vocab=50"),
        ({"size": 2**30}, "rows are more than an int32 counts"),
        ({"parts": 3}, "64 rows do not divide evenly over 3 parts"),
    ],
)
def test_sizes_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MEMORY(**options, key=jax.random.key(0))


def test_a_memory_without_ids_is_refused():
    with pytest.raises(ValueError, match="use an NGramBlock"):
        MEMORY(key=jax.random.key(0))(activations(1, 2, 16), TokenInfo())
