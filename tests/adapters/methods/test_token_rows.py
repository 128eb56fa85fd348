"""Trainable rows of an embedding, and virtual tokens: values, meshes, decoding, packed texts, refusals."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters

KEY = jax.random.key(0)
VOCAB, LENGTH = 32, 3
MODEL = eqx.filter_jit(zoo.models.Transformer)(vocab=VOCAB, embed=16, layers=1, heads=2, mlp=24, key=KEY)  # tied
TOKENS = jax.random.randint(KEY, (4, 8), 0, VOCAB)
VIRTUAL = VOCAB + jnp.arange(LENGTH)
run = eqx.filter_jit(lambda model, tokens, **options: model(tokens, **options))


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=3e-6 * float(jnp.abs(expected).max()), rtol=0)


def test_rows_count_in_the_embedding_and_the_tied_head():
    ids = [5, 2, 30]
    model = adapters.token_rows(MODEL, ids)
    assert zoo.count(model) == 3 * 16
    assert_close(run(model, TOKENS), run(MODEL, TOKENS))
    model = perturb(model)
    table = MODEL.embedding.weight.at[jnp.array(ids)].set(model.embedding.rows)
    expected = run(eqx.tree_at(lambda model: model.embedding.weight, MODEL, table), TOKENS)
    assert_close(run(model, TOKENS), expected)
    assert_close(run(adapters.merge(model), TOKENS), expected)
    half = adapters.set_strength(model, {"tokens": 0.5})
    assert_close(run(adapters.merge(half), TOKENS), run(half, TOKENS))
    assert_close(run(adapters.set_strength(model, {"tokens": 0}), TOKENS), run(MODEL, TOKENS))
    kept = adapters.merge(model, keep=True)
    assert_close(run(kept, TOKENS), expected)
    assert eqx.tree_equal(adapters.unmerge(kept), model)


def test_prompt_of_a_text_is_the_text():
    """In front of rows, as a prefix that is read once, in packed documents, and with penalties of repeated tokens."""
    text = TOKENS[0, :LENGTH]
    model = adapters.prompt(MODEL, LENGTH, text=text, key=KEY)
    assert zoo.count(model) == LENGTH * 16
    put_before = lambda ids: jnp.concatenate([jnp.broadcast_to(ids, (4, LENGTH)), TOKENS], axis=1)
    expected = run(MODEL, put_before(text))
    assert_close(run(model, put_before(VIRTUAL)), expected)
    packed = jnp.concatenate([put_before(VIRTUAL)] * 2, axis=1)
    segments = jnp.broadcast_to(jnp.repeat(jnp.array([1, 2]), 8 + LENGTH), packed.shape)
    assert_close(run(model, packed, segment_ids=segments)[:, 8 + LENGTH :], expected)
    options = {"max_new_tokens": 4, "repetition_penalty": 1.3, "presence_penalty": 0.2}
    decoded = zoo.generate(model, put_before(VIRTUAL), **options)
    prefix = zoo.prefill(model, VIRTUAL[None], length=32)
    np.testing.assert_array_equal(zoo.generate(model, TOKENS, prefix=prefix, **options), decoded)
    plain = {"max_new_tokens": 4}
    np.testing.assert_array_equal(
        zoo.generate(model, put_before(VIRTUAL), **plain), zoo.generate(MODEL, put_before(text), **plain)
    )


@pytest.mark.parametrize("layout", [None, zoo.parallel.SEQUENCE], ids=["fsdp", "tokens"])
def test_rows_and_a_prompt_on_a_mesh_match_one_device(layout):
    """A sharded vocabulary, whose shards have none or some of the rows, and a head that is tied to it."""
    model = adapters.prompt(adapters.token_rows(MODEL, [1, 17, 18]), 4, key=KEY)
    model = perturb(model, 0.3)
    tokens = jnp.concatenate([jnp.broadcast_to(VOCAB + jnp.arange(4), (4, 4)), TOKENS], axis=1)
    batch = {"tokens": tokens, "targets": jnp.concatenate([jnp.full((4, 3), -1), TOKENS, TOKENS[:, :1]], axis=1)}

    def mean_loss(trainable):
        total, count = zoo.cross_entropy(eqx.combine(trainable, model), batch)
        return total / count

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(zoo.trainable(model))
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2, layout=layout)
    found, found_gradients = zoo.value_and_grad(zoo.cross_entropy, mesh)(
        zoo.place(model, mesh), zoo.place_batch(batch, mesh)
    )
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(found_gradients), strict=True):
        np.testing.assert_allclose(y, x, atol=2e-5 * float(jnp.abs(x).max()))


def test_what_does_not_fit_is_refused():
    prompt = adapters.prompt(MODEL, LENGTH, key=KEY)
    for wrong, message in (
        (lambda: adapters.prompt(MODEL, 0, key=KEY), "length=0: expected 1 or more"),
        (lambda: adapters.prompt(MODEL, 2, text=TOKENS[0, :3], key=KEY), "a text of as many tokens"),
        (lambda: adapters.token_rows(MODEL, [3, 3]), "expected different ids of tokens below 32"),
        (lambda: adapters.token_rows(MODEL, [VOCAB]), "expected different ids of tokens below 32"),
        (lambda: adapters.token_rows(MODEL, []), "expected different ids of tokens below 32"),
        (lambda: adapters.merge(prompt), "no weight holds a trained state or virtual tokens"),
        (lambda: prompt(jnp.array([[VOCAB + LENGTH]])), "35"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
