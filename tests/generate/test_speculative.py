"""Speculative decoding gives the greedy tokens, and the distribution, of decoding without a draft."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import zoo
from zoo.layers import LatentAttention
from zoo.ops.rotary import DynamicScaling, Rotary
from zoo.ops.sampling import filter_logits

VOCAB = 64
SIZES = {"vocab": VOCAB, "embed": 16, "heads": 2, "mlp": 16}


@functools.cache
def make_model(layers=2, seed=0, scale=3.0, **options):
    make = functools.partial(zoo.models.Transformer, **SIZES | options, layers=layers, key=jax.random.key(seed))
    return jax.tree.map(lambda x: scale * x, make())


def make_latent_model():
    mixer = functools.partial(LatentAttention, latent=6, head_dim=4, value_dim=3, rotary=Rotary(2))
    sizes = {"vocab": VOCAB, "embed": 16, "layers": 2, "heads": 2, "mlp": 12, "experts": 4, "top": 2}
    return zoo.models.MixtureOfExperts(**sizes, mixer=mixer, key=jax.random.key(0))


def draw_prompt(rows=3, seq=9):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, seq))
    return jnp.asarray(tokens), jnp.asarray(np.arange(seq) >= np.array([0, 3, seq - 1])[:rows, None])


MODELS = {"window": functools.partial(make_model, windows=(8, None)), "latents": make_latent_model}
DRAFTS = {"the model": lambda model: model, "another": lambda model: make_model(1, 3), "prompt": lambda model: "prompt"}
"""The proposals of the first are all accepted without penalties, and those of the second hardly ever."""


@pytest.mark.one_case("slow")
@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("window", "another"),
        ("latents", "prompt"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(MODELS, DRAFTS)
            if case not in (("window", "another"), ("latents", "prompt"))
        ),
    ],
)
def test_greedy_tokens_are_those_without_a_draft(name, drafts):
    """With every rule that changes logits or ends rows: the longest row has more tokens than the window holds."""
    model = MODELS[name]()
    tokens, mask = draw_prompt()
    plain = np.asarray(zoo.generate(model, tokens, mask=mask, max_new_tokens=24))
    stop = tuple(plain[1, 7:9].tolist())
    rules = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "samples": 2}
    for options in ({"stop_tokens": (int(plain[0, 12]),), "stop_sequences": (stop,)}, rules):
        options = {"mask": mask, "max_new_tokens": 24, "details": True} | options
        expected = zoo.generate(model, tokens, **options)
        found = zoo.generate(model, tokens, **options, draft=DRAFTS[drafts](model), draft_tokens=3)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
        np.testing.assert_array_equal(found.prefix.text, expected.prefix.text)
        assert (found.sampling_log_probs == 0).all()
        assert found.steps <= expected.steps
    if drafts == "the model":
        found = zoo.generate(model, tokens, mask=mask, max_new_tokens=24, draft=model, draft_tokens=3, details=True)
        np.testing.assert_array_equal(found.tokens, plain)
        assert found.steps == 24 / (3 + 1)


@pytest.mark.ci
def test_states_after_rejections_go_on():
    """No trace of rejected tokens is in the caches."""
    model = MODELS["window"]()
    tokens, mask = draw_prompt()
    options = {"mask": mask, "max_new_tokens": 21, "details": True, "length": 64}
    prefixes = [zoo.generate(model, tokens, **options, draft=draft).prefix for draft in (None, make_model(1, 3))]
    expected, found = (zoo.generate(model, tokens, prefix=prefix, max_new_tokens=8) for prefix in prefixes)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.ci
def test_prompt_lookup_reads_a_repeated_text_in_fewer_steps():
    """The first n-gram that matches; copied text is accepted at once, and a prefix is looked up, too."""
    model = make_model()
    tokens, _ = draw_prompt()
    new = zoo.generate(model, tokens, max_new_tokens=20)
    again = jnp.concatenate([tokens, new, tokens], axis=1)
    expected = zoo.generate(model, again, max_new_tokens=20)
    prefix = zoo.prefill(model, again[:, :20], length=128)
    for options in ({"tokens": again}, {"tokens": again[:, 20:], "prefix": prefix}):
        found = zoo.generate(model, max_new_tokens=20, draft="prompt", draft_tokens=6, details=True, **options)
        np.testing.assert_array_equal(found.tokens, expected)
        assert found.steps <= 20


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("draft", ["another", "prompt", "mtp"])
def test_samples_follow_the_distribution_of_the_model(draft):
    """p(a, b, c) by chi-square over 6,000 rows of one prompt with fixed keys, after temperature, top-k and min-p. The
    draft's own distribution would fail. Some of its proposals are accepted: for the first token p is (0, 0.30, 0,
    0.02, 0.68), and q (0, 0.22, 0.22, 0.35, 0.21)."""
    vocab, rows = 5, 6000
    model = zoo.models.add_predictors(make_model(2, 4, 2.0, vocab=vocab), 2, key=jax.random.key(0))
    other = make_model(1, 3, 0.5, vocab=vocab)
    prompt = jnp.array([[1, 3, 0, 2, 1, 3]])
    options = {"temperature": 1.5, "top_k": 4, "min_p": 0.02}
    triples = jnp.array(list(itertools.product(range(vocab), repeat=3)))
    texts = jnp.concatenate([jnp.repeat(prompt, len(triples), 0), triples], axis=1)

    def find_probabilities(model):
        logits = model(texts)[:, 5:8] / options["temperature"]
        filters = {name: options[name] for name in ("top_k", "min_p")}
        scores = jax.nn.log_softmax(jax.vmap(functools.partial(filter_logits, **filters), 1, 1)(logits))
        return np.exp(np.float64(jnp.take_along_axis(scores, triples[..., None], axis=-1).sum((1, 2))))

    new = zoo.generate(
        model,
        prompt,
        samples=rows,
        max_new_tokens=3,
        draft=other if draft == "another" else draft,
        draft_tokens=2,
        key=jax.random.key(7),
        **options,
    )
    counts = np.bincount(np.asarray(new) @ np.array([vocab**2, vocab, 1]), minlength=vocab**3)
    expected = rows * find_probabilities(model)
    assert not counts[expected == 0].any()
    is_frequent = expected > 5
    assert is_frequent.sum() > 20

    def measure_fit(expected):
        found = np.append(counts[is_frequent], counts[~is_frequent].sum())
        return stats.chisquare(found, np.append(expected[is_frequent], rows - expected[is_frequent].sum())).pvalue

    assert measure_fit(expected) > 1e-3
    assert measure_fit(0.5 * expected + 0.5 * rows * find_probabilities(other)) < 1e-9


@pytest.mark.ci
def test_samples_do_not_depend_on_other_rows():
    model = make_model()
    tokens, _ = draw_prompt()
    draw = lambda tokens: zoo.generate(
        model, tokens, max_new_tokens=8, temperature=1.0, key=jax.random.key(2), draft=make_model(1, 3)
    )
    np.testing.assert_array_equal(draw(tokens)[:1], draw(tokens[:1]))


@pytest.mark.ci
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "context": 2, "tensor": 2},
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_on_a_mesh(axes):
    models = make_model(windows=(8, None)), make_model(1, 3)
    tokens, mask = draw_prompt()
    mesh = zoo.make_mesh(**axes)

    def run(model, draft, mesh):
        options = {"mask": mask, "max_new_tokens": 14, "mesh": mesh, "key": jax.random.key(1), "temperature": 0.8}
        return zoo.generate(model, tokens, draft=draft, draft_tokens=3, **options)

    found = run(*zoo.place(models, mesh), mesh)
    np.testing.assert_array_equal(found, run(*models, None))


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (
            make_model,
            {"draft": lambda: zoo.models.Mamba(vocab=VOCAB, embed=16, layers=1, key=jax.random.key(0))},
            NotImplementedError,
            "layer 0 of the draft has a recurrent state, MambaState",
        ),
        (
            functools.partial(make_model, rotary=Rotary(8, scaling=DynamicScaling(2.0, 16))),
            {"draft": "prompt"},
            NotImplementedError,
            "RoPE of the model depends on the length so far.*give length",
        ),
        (
            make_model,
            {"draft": functools.partial(make_model, vocab=5)},
            ValueError,
            "its vocabulary has 5 tokens, and the model's 64",
        ),
        (make_model, {"draft": "ngrams"}, TypeError, 'a Decoder, "prompt" to look tokens up.*not .ngrams.'),
        (make_model, {"draft": "prompt", "draft_tokens": 0}, ValueError, "draft_tokens of at least 1, not 0"),
        (make_model, {"draft": "prompt", "callback": print}, ValueError, "a callback gets one token of each row"),
        (make_model, {"draft": make_model, "prefix": True}, NotImplementedError, "has not read the prefix"),
        (
            functools.partial(make_model, windows=(8, None)),
            {"draft": "prompt", "prefix": True},
            NotImplementedError,
            "the windows of the prefix have no room",
        ),
    ],
)
def test_unsupported_drafts_raise_by_name(no_type_checks, make, options, error, message):
    model = make()
    tokens, _ = draw_prompt()
    if callable(options["draft"]):
        options = options | {"draft": options["draft"]()}
    if options.get("prefix"):
        options = options | {"prefix": zoo.prefill(model, tokens, length=32)}
    with pytest.raises(error, match=message):
        zoo.generate(model, tokens, max_new_tokens=4, **options)
