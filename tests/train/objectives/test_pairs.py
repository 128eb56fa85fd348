"""Sums over the texts of rows are the same however texts are packed, and on a sharded sequence."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import zoo
from zoo import train
from zoo.models.segment_sums import sum_segments

LENGTHS = (5, 7, 4, 4, 9, 3, 6, 5)
"""Tokens of the texts: four pairs."""


def make_rows(seq_len, *, texts_per_item, pack):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, sum(LENGTHS))
    mask = rng.random(sum(LENGTHS)) < 0.7
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    options = {"texts_per_item": texts_per_item, "too_long": "drop", "pack": pack}
    rows = train.PackedRows(tokens, mask, starts, seq_len, **options)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def collect(pairs):
    """Chosen and rejected of all pairs, sorted."""
    is_pair = np.asarray(pairs.mask) > 0
    return np.sort(np.stack([np.asarray(x)[is_pair] for x in (pairs.chosen, pairs.rejected)]), axis=1)


def test_sums_of_pairs_do_not_depend_on_rows():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))

    @eqx.filter_jit
    def sum_all(model, batch):
        x = zoo.log_probs(model, batch)
        lengths = sum_segments(batch["weights"], batch["segment_ids"])
        sums = sum_segments(x * batch["weights"], batch["segment_ids"])
        return train.sum_pairs(x, batch), train.average_pairs(x, batch), sums, lengths

    summed, averaged, _, _ = sum_all(model, make_rows(24, texts_per_item=2, pack=False))
    packed, averaged_packed, _, _ = sum_all(model, make_rows(40, texts_per_item=2, pack=True))
    assert packed.mask.shape == (1, 20) and packed.mask.sum() == 4
    np.testing.assert_allclose(collect(packed), collect(summed), rtol=1e-5)
    np.testing.assert_allclose(collect(averaged_packed), collect(averaged), rtol=1e-5)
    _, _, sums, lengths = sum_all(model, make_rows(24, texts_per_item=1, pack=False))
    np.testing.assert_allclose(np.sort([sums[0::2, 0], sums[1::2, 0]], axis=1), collect(summed), rtol=1e-5)
    means = sums[:, 0] / np.maximum(lengths[:, 0], 1)
    np.testing.assert_allclose(np.sort([means[0::2], means[1::2]], axis=1), collect(averaged), rtol=1e-5)
    assert (summed.chosen[:, 1:] == 0).all() and (summed.mask[:, 1:] == 0).all()


def test_sums_over_a_sharded_sequence():
    batch = make_rows(40, texts_per_item=2, pack=True)
    x = np.random.default_rng(1).normal(size=batch["tokens"].shape).astype(np.float32)
    expected = train.sum_pairs(jnp.asarray(x), batch)
    mesh = zoo.make_mesh(data=1, context=2, devices=jax.devices()[:2])
    run = zoo.spmd(lambda x, batch: tuple(train.sum_pairs(x, batch)), mesh, out=("batch pairs",) * 3)
    found = run(*zoo.place_batch((x, batch), mesh))
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


def test_padding_is_in_no_segment():
    x = jnp.ones((1, 6))
    segment_ids = jnp.array([[1, 1, 2, 0, 0, 0]])
    assert sum_segments(x, segment_ids).tolist() == [[2, 1, 0, 0, 0, 0]]
    assert sum_segments(x, segment_ids, 1).tolist() == [[2]]


def test_empty_places_have_no_gradient():
    segment_ids = jnp.array([[1, 1, 2, 2, 0, 0]])
    batch = {"weights": jnp.array([[0.0, 1, 0, 1, 0, 0]]), "segment_ids": segment_ids}

    def loss(x):
        pairs = train.average_pairs(x, batch)
        return (train.objectives.ipo(pairs.chosen, pairs.rejected) * pairs.mask).sum()

    gradient = jax.grad(loss)(jnp.arange(6.0)[None])
    assert np.isfinite(gradient).all() and (gradient[0, jnp.array([0, 2, 4, 5])] == 0).all()
