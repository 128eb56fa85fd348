"""Requests get the numbers and texts of lm_eval's own Hugging Face model, on one device and on a mesh."""

import math

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import zoo
from tests.jaxprs import arrays
from zoo.text.tokenizers import ByteTokenizer
from zoo.tools.evaluate import GenerationOptions, LanguageModel, TextPrompt, load_language_model
from zoo.tools.evaluate.rows import split_rolling
from zoo.tools.evaluate.scores import score_targets

from .parity import FOLDER, TOLERANCE, list_requests

LENGTH = 64
MESHES = {"one device": {}, "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2}}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return load_language_model(FOLDER / "model", batch=4, length=LENGTH)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_requests_match_lm_eval(sizes):
    mesh = zoo.make_mesh(**sizes) if sizes else None
    lm = load_language_model(FOLDER / "model", mesh=mesh, batch=4, length=LENGTH)
    assert lm.prefix_token == 0
    pairs, expected = zip(*list_requests("zoo_choice"), strict=True)
    found = lm.log_likelihoods([lm.encode_pair(*pair) for pair in pairs])
    assert [x.log_likelihood for x in found] == pytest.approx([x for x, _ in expected], abs=TOLERANCE)
    assert [x.is_greedy for x in found] == [flag for _, flag in expected]

    documents, expected = zip(*list_requests("zoo_documents"), strict=True)
    found = lm.rolling_log_likelihoods([text for (text,) in documents])
    assert found == pytest.approx(expected, abs=TOLERANCE)

    questions, expected = zip(*list_requests("zoo_questions"), strict=True)
    prompts = []
    for text, options in questions:
        prompts.append(TextPrompt(lm.encode(text), GenerationOptions(options["max_gen_toks"], tuple(options["until"]))))
    assert lm.generate(prompts) == list(expected)

    # Of equal logits only the first is greedy, wherever the vocabulary is cut.
    flat = LanguageModel(jax.tree.map(jnp.zeros_like, lm.model), lm.tokenizer, mesh, batch=4, length=LENGTH)
    first, other, last = flat.log_likelihoods([([1], [0]), ([1], [1]), ([1], [319])])
    assert (first.is_greedy, other.is_greedy, last.is_greedy) == (True, False, False)
    assert first.log_likelihood == pytest.approx(-math.log(320), abs=1e-5)


def test_scores_match_the_logits_of_a_cut_context(lm):
    context, continuation = lm.encode_pair("the bridge was old, and " * 6, "the ferry")
    assert len(context) + len(continuation) > LENGTH + 1
    row = jnp.array([[*context, *continuation][-(LENGTH + 1) : -1]])
    logs = jax.nn.log_softmax(lm.model(row).astype(jnp.float32))[0][-len(continuation) :]
    expected = sum(float(line[token]) for line, token in zip(logs, continuation, strict=True))
    (found,) = lm.log_likelihoods([(context, continuation)])
    assert found.log_likelihood == pytest.approx(expected, abs=1e-4)
    assert found.is_greedy == (logs.argmax(axis=1).tolist() == continuation)


def test_no_device_gets_the_logits_of_the_whole_vocabulary(lm):
    mesh = zoo.make_mesh(data=1, tensor=2, devices=jax.devices()[:2])
    batch = {"tokens": jnp.zeros((2, 24), jnp.int32), "targets": jnp.zeros((2, 24), jnp.int32)}
    program = zoo.spmd(score_targets, mesh, out=("batch seq", "batch seq", "batch"))
    jaxpr, *_ = eqx.filter_make_jaxpr(program)(lm.model, batch | {"numbers": jnp.zeros(2, jnp.int32)})
    shapes = [getattr(array, "shape", ()) for array in arrays(jaxpr)]
    assert any(shape[-1:] == (160,) for shape in shapes) and not any(320 in shape for shape in shapes)


def test_samples_have_keys_of_their_own(lm):
    """Also requests of another batch: the prompt is in eight rows, in two batches."""
    prompt = TextPrompt(lm.encode("The river was"), GenerationOptions(12, temperature=3.0))
    texts = lm.generate([prompt] * 8)
    assert len(set(texts)) == 8
    assert lm.generate([prompt] * 8) == texts


@pytest.mark.ci
def test_texts_end_at_stop_strings_in_any_batch(lm):
    prompts = ["Water boils at a lower", "The river was wide, the", "é: A pair has a", "Question: what is two", "A"]
    options = [
        GenerationOptions(12),
        GenerationOptions(12, ("ridge wa", "zzz")),
        GenerationOptions(12, temperature=3.0),
        GenerationOptions(12, temperature=3.0, seed=1),
    ]
    asked = [TextPrompt(lm.encode(text), each) for each in options for text in prompts]
    found = lm.generate(asked)
    plain, stopped, sampled, other = (found[start : start + 5] for start in range(0, 20, 5))
    assert " bridge was" in plain[1] and stopped[1] == plain[1].partition("ridge wa")[0]
    assert stopped[0] == plain[0] and sampled != plain and sampled != other
    assert lm.generate(asked) == found
    assert lm.generate(asked[:5][::-1]) == plain[::-1]


def test_stop_strings_of_special_tokens_end_a_text():
    """Each token is followed by the next of a chain, in which a special token ends a turn."""
    tokenizer = ByteTokenizer()
    tokenizer.special_tokens = {"<end>": 0}
    chain = list(b"qab\0cdef")
    model = zoo.models.Transformer(vocab=256, embed=256, layers=1, heads=1, mlp=2, tied=False, key=jax.random.key(0))
    model = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_inexact_array(x) and x.ndim == 3 else x, model)
    follows = jnp.zeros((256, 256)).at[jnp.array(chain[1:]), jnp.array(chain[:-1])].set(1.0)
    model = eqx.tree_at(lambda model: (model.embedding.weight, model.head.weight), model, (jnp.eye(256), follows))
    expected = {("<end>",): "ab", ("b<end>", "zz"): "a", ("<end>cd",): "ab", ("dx",): "abcdef"}
    for stop_tokens in ((), (0,)):
        lm = LanguageModel(model, tokenizer, batch=1, length=64, stop_tokens=stop_tokens)
        for until, text in expected.items():
            (found,) = lm.generate([TextPrompt(chain[:1], GenerationOptions(7, until))])
            assert found == (text[:2] if stop_tokens else text)


@hypothesis.given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 9))
def test_rolling_windows_tile_the_text(tokens, length):
    windows = split_rolling(tokens, -1, length)
    assert [token for _, continuation in windows for token in continuation] == tokens
    for number, (context, continuation) in enumerate(windows):
        assert 1 <= len(context) and len(context) + len(continuation) - 1 <= length
        start = sum(len(before) for _, before in windows[:number])
        known = [-1, *tokens[:start]]
        assert list(context) == known[len(known) - len(context) :]
        if number:
            assert len(context) + len(continuation) - 1 == length  # the last one has all the context that fits


def test_pairs_are_cut_behind_the_context_and_its_spaces_move(lm):
    for context, continuation in [
        ("The river was", " wide"),
        ("The river was ", "wide"),
        ("The river was \n ", "wide"),
    ]:
        tokens, rest = lm.encode_pair(context, continuation)
        assert tokens == lm.encode("The river was") and [*tokens, *rest] == lm.encode(context + continuation)
    assert lm.encode_pair("", "wide") == ([0], lm.tokenizer.encode("wide").tolist())
    assert lm.encode_pair(" ", "wide") == ([0], lm.tokenizer.encode(" wide").tolist())
    assert lm.encode_pair("", "<|endoftext|>wide") == lm.encode_pair("", "wide")
    bytes_lm = LanguageModel(lm.model, ByteTokenizer())
    assert bytes_lm.encode("ab") == [0, 97, 98] and bytes_lm.encode_pair("a", "b") == ([0, 97], [98])
    assert bytes_lm.encode("\0ab") == [0, 97, 98]  # the text brings the prefix


def test_requests_that_cannot_be_answered_are_named(lm):
    with pytest.raises(ValueError, match=r"request 1: context and continuation need .* they have 1 and 0"):
        lm.log_likelihoods([([1], [2]), ([1], [])])
    with pytest.raises(ValueError, match=r"request 0: its continuation has 65 tokens, and the model reads 64"):
        lm.log_likelihoods([([1], [2] * 65)])
    with pytest.raises(ValueError, match="gives token 320, and the model's vocabulary has 320"):
        lm.log_likelihoods([([1], [320])])
    with pytest.raises(ValueError, match="request 0: 64 new tokens leave no room for a prompt within 64"):
        lm.generate([TextPrompt([1], GenerationOptions(64))])
    with pytest.raises(ValueError, match="request 1: a prompt needs at least one token"):
        lm.generate([TextPrompt([1], GenerationOptions(4)), TextPrompt([], GenerationOptions(4))])
    with pytest.raises(ValueError, match="batch is a number of rows, at least 1, not 0"):
        LanguageModel(lm.model, lm.tokenizer, batch=0)
    with pytest.raises(ValueError, match="at least 2 for each of 2 devices along the sequence, not 3"):
        LanguageModel(lm.model, lm.tokenizer, zoo.make_mesh(data=4, context=2), length=3)
    with pytest.raises(NotImplementedError, match="cannot be generated on a mesh with pipe"):
        LanguageModel(lm.model, lm.tokenizer, zoo.make_mesh(data=4, pipe=2)).generate([])
    broken = LanguageModel(jax.tree.map(lambda x: x * jnp.nan, lm.model), lm.tokenizer, batch=4, length=LENGTH)
    with pytest.raises(ValueError, match="request 0: its log-likelihood is not a number: try --dtype float32"):
        broken.log_likelihoods([([1], [2])])
