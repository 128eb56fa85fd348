"""Evaluations: bits per byte on held-out text, and summed auxiliary results."""

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from zoo import train
from zoo.text.batches import OrderedBatches


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    texts = {f"{number}.txt": f"{number} cats sat on the mat and saw that it was flat " * 10 for number in range(40)}
    return train.load_text(texts, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(vocab=256, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))


def test_evaluation_is_the_mean_over_all_tokens(corpus, model):
    mesh = train.MeshOptions().make_mesh()
    held_out = corpus.validation.ordered(16, 8)
    bits = train.Evaluation(zoo.cross_entropy, mesh, new=held_out)(zoo.place(model, mesh))
    total, count, compute = 0.0, 0.0, eqx.filter_jit(zoo.cross_entropy)
    for batch in held_out:
        loss, weight = compute(model, batch)
        total, count = total + float(loss), count + float(weight)
    assert bits == {"new": pytest.approx(total / count / np.log(2) / held_out.bytes_per_token, rel=1e-5)}


def test_evaluation_sums_aux_over_batches(corpus, model):
    def loss_fn(model, batch):
        return zoo.cross_entropy(model, batch), [batch["weights"].sum()]

    mesh = train.MeshOptions().make_mesh()
    held_out = corpus.validation.ordered(16, 8)
    bits, (count,) = train.Evaluation(loss_fn, mesh, has_aux=True, a=held_out)(zoo.place(model, mesh))
    assert count == sum(batch["weights"].sum() for batch in held_out) and bits.keys() == {"a"}


def test_evaluation_needs_the_bytes_of_tokens_at_once(corpus):
    windows = train.TokenWindows(corpus.validation.tokens, 16)
    with pytest.raises(ValueError, match="these batches need `token_bytes` of the tokenizer"):
        train.Evaluation(zoo.cross_entropy, train.MeshOptions().make_mesh(), new=OrderedBatches(windows, 8))


@pytest.mark.ci
def test_continue_prompts_pads_prompts_on_the_left(corpus, model):
    key = jax.random.key(1)
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    greedy = dict(mesh=mesh, key=key, max_new_tokens=4, temperature=0.0)  # reports of recipes sample
    (alone,), pairs = (
        train.continue_prompts(model, corpus, prompts, **greedy) for prompts in (["a"], ["a", "the cat"])
    )
    assert [prompt for prompt, _ in pairs] == ["a", "the cat"] and alone == pairs[0]
