"""Continuous batching gives each request the tokens that it gets alone, and compiles nothing after the first."""

import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.generate.test_buckets import count_compilations
from zoo.generate import Request
from zoo.layers import Attention, GatedDeltaNet
from zoo.ops.rotary import DynamicScaling, Rotary

VOCAB = 64
SHARED = {"top_k": 30, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
ENDS = {"stop_tokens": tuple(range(0, VOCAB, 6)), "stop_sequences": ((1, 2), (9, 9, 9))}


@functools.cache
def make_model(name="window"):
    if name == "window":
        options = {"heads": 4, "kv_heads": 2, "mlp": 24, "windows": (8, None)}
        make = partial(zoo.models.Transformer, vocab=VOCAB, embed=16, layers=2, key=jax.random.key(0), **options)
    else:
        pattern = [partial(GatedDeltaNet, heads=2), partial(Attention, heads=2, rotary=Rotary(8))]
        make = partial(zoo.models.Hybrid, vocab=VOCAB, embed=16, layers=2, pattern=pattern, key=jax.random.key(0))
    return jax.tree.map(lambda x: 3 * x, make())


def make_requests(first=0):
    sizes = ((5, 9, 0.0), (13, 3, 1.0), (3, 22, 0.7), (20, 6, 0.0), (9, 1, 0.0), (2, 40, 1.3), (1, 30, 0.0))
    for number, (seq, new, temperature) in enumerate(sizes):
        tokens = np.random.default_rng(number).integers(0, VOCAB, seq)
        yield Request(tokens.tolist(), new, temperature=temperature, key=jax.random.key(number + first))


def collect(events):
    """Tokens and log-probabilities by request; every request ends once."""
    tokens, scores, ended = {}, {}, []
    for event in events:
        assert event.request not in ended
        tokens.setdefault(event.request, []).extend(event.tokens)
        scores.setdefault(event.request, []).extend(event.log_probs or ())
        ended += [event.request] * event.ended
    assert sorted(ended) == sorted(tokens)
    return tokens, scores


def generate_alone(model, asked, **options):
    if not asked.temperature:
        options = {name: x for name, x in options.items() if name != "top_k"}
    given = {"max_new_tokens": asked.max_new_tokens, "temperature": asked.temperature, "key": asked.key}
    found = zoo.generate(model, jnp.array([asked.tokens]), **given, **options, details=True)
    count = int((found.tokens >= 0).sum())
    return found.tokens[0, :count].tolist(), found.log_probs[0, :count].tolist()


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["window", "hybrid"])
def test_requests_get_the_tokens_that_they_get_alone(name):
    model = make_model(name)
    stream = partial(zoo.generate_stream, model, rows=3, length=64, details=True, **SHARED, **ENDS)
    tokens, scores = collect(stream(make_requests()))
    lengths = set()
    for number, asked in enumerate(make_requests()):
        expected, expected_scores = generate_alone(model, asked, length=64, **SHARED, **ENDS)
        assert tokens[number] == expected
        np.testing.assert_allclose(scores[number], expected_scores, atol=1e-4)
        lengths.add(len(expected) - asked.max_new_tokens)
    assert len(lengths) > 1
    with count_compilations() as compiled:
        collect(stream(make_requests(first=8)))
    assert not compiled


def test_requests_are_taken_as_rows_are_free():
    taken = []

    def ask():
        for number, asked in enumerate(make_requests()):
            taken.append(number)
            yield asked

    events = zoo.generate_stream(make_model(), ask(), rows=2, length=64)
    next(events)
    assert taken == [0, 1]
    list(events)
    assert taken == list(range(7))


@pytest.mark.ci
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "context": 2, "tensor": 2},
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_on_a_mesh(axes):
    mesh = zoo.make_mesh(**axes)
    run = lambda model, mesh: collect(
        zoo.generate_stream(model, make_requests(), rows=3, length=64, mesh=mesh, **SHARED, **ENDS)
    )
    assert run(zoo.place(make_model(), mesh), mesh) == run(make_model(), None)


def test_logits_that_are_not_finite_name_the_request():
    model = make_model()
    broken = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight.at[5].set(jnp.nan))
    requests = [Request([1, 2], 3), Request([1, 5, 2], 3)]
    with pytest.raises(ValueError, match="logits of request [01] are not finite after 0 new tokens"):
        list(zoo.generate_stream(broken, requests, rows=2, length=16))


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({"rows": 0}, [], "rows of at least 1, not 0"),
        ({"length": 8}, [Request([1] * 6, 3)], "request 0: length=8 does not hold 6 tokens of the prompt and 3 new"),
        ({}, [Request([1], 2), Request([1], 2, temperature=1.0)], "request 1: temperature=1.0 needs"),
        ({}, [Request([VOCAB], 2)], "request 0: the prompt holds 64"),
        ({}, [Request([1], 0)], "request 0: generate needs max_new_tokens of at least 1"),
        ({"top_p": 2.0}, [], "top_p is above 0 and at most 1"),
        ({"stop_sequences": ((),)}, [], "stop_sequences holds an empty sequence"),
    ],
    ids=str,
)
def test_bad_requests_and_options_raise(options, asked, message):
    with pytest.raises(ValueError, match=message):
        list(zoo.generate_stream(make_model(), asked, **{"rows": 1, "length": 16} | options))


def test_rope_that_depends_on_the_length_raises():
    rotary = Rotary(8, scaling=DynamicScaling(2.0, 16))
    model = zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=1, mlp=8, rotary=rotary, key=jax.random.key(0))
    with pytest.raises(NotImplementedError, match="RoPE of this model depends on the length"):
        zoo.generate_stream(model, [], rows=1, length=16)
