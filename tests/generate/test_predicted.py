"""Drafts by predictors: plain greedy tokens, proposals as whole passes give them, and the sampler's distribution."""

import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Attention, GatedDeltaNet, Mamba2
from zoo.layers.token_info import TokenInfo
from zoo.models import add_predictors, repeat_predictor
from zoo.models.predictors import predict_further
from zoo.ops.rotary import DynamicScaling, Rotary

VOCAB = 6
SIZES = {"vocab": VOCAB, "embed": 16, "mlp": 16}


@functools.cache
def make_model(kind, count=2):
    key = jax.random.key(3)
    if kind == "attention":
        model = zoo.models.Transformer(**SIZES, layers=2, heads=2, key=key)
    elif kind == "hybrid":
        pattern = [partial(GatedDeltaNet, heads=2), partial(Attention, heads=2, rotary=Rotary(8))]
        model = zoo.models.Hybrid(**SIZES, layers=2, pattern=pattern, key=key)
    elif kind == "scaled":
        model = zoo.models.Transformer(
            **SIZES, layers=1, heads=2, rotary=Rotary(8, scaling=DynamicScaling(2.0, 16)), key=key
        )
    else:  # its predictors have recurrent states, too
        model = zoo.models.Hybrid(**SIZES, layers=2, pattern=[partial(Mamba2, head_dim=16)], key=key)
    return jax.tree.map(lambda x: 3.0 * x, add_predictors(model, count, key=jax.random.key(53)))


def draw_prompt(rows=3, seq=9):
    """Rows of 9, 6 and 1 tokens, padded on the left."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, seq))
    return jnp.asarray(tokens), jnp.asarray(np.arange(seq) >= np.array([0, 3, seq - 1])[:rows, None])


def count_rounds(model, text, prompt, depths):
    """Rounds of a row whose text is known, with proposals of whole passes over it."""

    @eqx.filter_jit
    def run(tokens):
        x = model.hidden(tokens, TokenInfo())[0].x
        return [model.logits(x).argmax(-1)[0] for x in predict_further(model, tokens, TokenInfo(), x)[0]]

    predicted = [np.asarray(x) for x in run(jnp.asarray(text)[None])]
    rounds, latest = 0, prompt - 1
    while latest < len(text) - 1:
        rounds += 1
        wanted = min(depths, len(text) - 2 - latest) if latest else 0
        accepted = 0
        while accepted < wanted and predicted[accepted][latest - 1] == text[latest + 1 + accepted]:
            accepted += 1
        latest += accepted + 1
    return rounds


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
def test_greedy_tokens_are_plain_and_proposals_right(kind):
    """Proposals are right now and then, and never always: the number of rounds tells whether each was the right one."""
    model = make_model(kind)
    tokens, mask = draw_prompt()
    plain = np.asarray(zoo.generate(model, tokens, mask=mask, max_new_tokens=60))
    found = zoo.generate(model, tokens, mask=mask, max_new_tokens=60, draft="mtp")
    np.testing.assert_array_equal(found, plain)
    for row in range(3):
        prompt = tokens[row][mask[row]]
        rounds = count_rounds(model, np.concatenate([prompt, plain[row]]), len(prompt), 2)
        assert rounds < 57
        options = {"mask": mask[row : row + 1], "max_new_tokens": 60, "draft": "mtp", "details": True}
        assert zoo.generate(model, tokens[row : row + 1], **options).steps == rounds


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_greedy_tokens_with_every_rule(kind):
    model = make_model(kind)
    tokens, mask = draw_prompt()
    plain = np.asarray(zoo.generate(model, tokens, mask=mask, max_new_tokens=24))
    stop = tuple(plain[1, 7:9].tolist())
    rules = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "samples": 2}
    for options in (
        {"stop_tokens": (int(plain[0, 12]),), "stop_sequences": (stop,), "length": 64},
        rules | {"length": 64},
    ):
        options = {"mask": mask, "max_new_tokens": 24, "details": True} | options
        expected = zoo.generate(model, tokens, **options)
        found = zoo.generate(model, tokens, **options, draft="mtp", draft_tokens=1)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
        more = jnp.ones((len(found.tokens), 2), int)
        follow = [zoo.generate(model, more, prefix=each.prefix, max_new_tokens=6) for each in (expected, found)]
        np.testing.assert_array_equal(*follow)


@pytest.mark.ci
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_mesh_samples_equal_those_of_one_device(axes):
    """A long prompt, which `context` shards, in several pieces."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (3, 100)))
    mesh = zoo.make_mesh(**axes)
    for kind in ("attention", "hybrid"):
        model = make_model(kind)
        options = {"max_new_tokens": 12, "draft": "mtp", "key": jax.random.key(1), "temperature": 0.8}
        expected = zoo.generate(model, tokens, **options)
        np.testing.assert_array_equal(zoo.generate(zoo.place(model, mesh), tokens, mesh=mesh, **options), expected)


@pytest.mark.ci
def test_a_predictor_that_is_used_again_predicts_further_tokens():
    model = repeat_predictor(make_model("attention", 1), 3)
    tokens, _ = draw_prompt()
    plain = np.asarray(zoo.generate(model, tokens[:1], max_new_tokens=24))
    found = zoo.generate(model, tokens[:1], max_new_tokens=24, draft="mtp", details=True)
    np.testing.assert_array_equal(found.tokens, plain)
    assert found.steps == count_rounds(model, np.concatenate([tokens[0], plain[0]]), 9, 3)


def test_unsupported_drafts_raise_by_name(no_type_checks):
    tokens, _ = draw_prompt()
    model = make_model("attention")
    bare = zoo.models.Transformer(**SIZES, layers=1, heads=2, key=jax.random.key(0))
    prefix = zoo.prefill(model, tokens, length=32)
    run = partial(zoo.generate, tokens=tokens, max_new_tokens=4, draft="mtp")
    with pytest.raises(
        ValueError, match=r"draft_tokens=3: the predictors of the model predict 2 tokens.*repeat_predictor"
    ):
        run(model, draft_tokens=3)
    with pytest.raises(ValueError, match="the model has no predictors"):
        run(bare)
    with pytest.raises(NotImplementedError, match="the predictors of the model have not read the prefix"):
        run(model, prefix=prefix)
    with pytest.raises(NotImplementedError, match="RoPE of the model depends on the length"):
        run(make_model("scaled"))
