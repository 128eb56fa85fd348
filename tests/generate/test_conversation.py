"""A conversation gives the tokens that one call of `generate` gives, and reads each token once."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import zoo
from zoo.generate import Conversation
from zoo.generate import conversation as module
from zoo.layers import Attention, GatedDeltaNet, Mamba2
from zoo.ops.rotary import Rotary

VOCAB = 64
FIXTURES = Path(__file__).parents[1] / "fixtures" / "image_text"
MORE = {"gemma3_image": (4, 16, 16), "llava_clip": (9, 12, 12)}
"""Features of an image, its height and its width."""
MIXERS = {
    "attention": [partial(Attention, heads=4, kv_heads=2, rotary=Rotary(4))],
    "window": [partial(Attention, heads=2, rotary=Rotary(8), window=5), partial(Attention, heads=2)],
    "hybrid": [partial(GatedDeltaNet, heads=2), partial(Mamba2, heads=4, head_dim=8, state_dim=4)],
}


def make(name="attention"):
    make = partial(zoo.models.Hybrid, vocab=VOCAB, embed=16, layers=2, pattern=MIXERS[name], key=jax.random.key(0))
    return jax.tree.map(lambda x: 3 * x, make())


def draw(number, count):
    return np.random.default_rng(number).integers(0, VOCAB, count).tolist()


def generate(model, text, count, **options):
    return np.asarray(zoo.generate(model, np.array([text]), max_new_tokens=count, **options))[0].tolist()


@pytest.fixture
def count_read(monkeypatch):
    """Return the numbers of tokens that each turn reads, and empty the list."""
    seen = []
    pad = module.pad_prompt
    monkeypatch.setattr(module, "pad_prompt", lambda tokens, *args: seen.append(tokens.shape[1]) or pad(tokens, *args))
    return seen


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("name", MIXERS)
def test_turns_give_the_tokens_of_generate(name, count_read):
    model = make(name)
    conversation = Conversation(model)
    text = draw(1, 9)
    seen = set()
    for turn, count in enumerate((4, 7, 3)):
        new = list(conversation.stream(text, max_new_tokens=count))
        assert new == generate(model, text, count)
        seen.update(new)
        assert conversation.held == (*text, *new[:-1])
        text = [*text, *new, *draw(turn, 6)]
    assert len(seen) > 2
    assert count_read == [9, 7, 7]  # the latest token of a turn is read with the next one


def test_an_answer_may_end_early_or_at_a_stop_token(count_read):
    model = make()
    text = draw(2, 8)
    expected = generate(model, text, 12)
    conversation = Conversation(model)
    stream = conversation.stream(text, max_new_tokens=12)
    begun = [next(stream) for _ in range(3)]
    stream.close()
    text = [*text, *begun, *draw(3, 5)]
    assert list(conversation.stream(text, max_new_tokens=4)) == generate(model, text, 4)
    assert begun == expected[:3] and count_read == [8, 6]
    stop = expected[5]
    stopped = list(Conversation(model, stop_tokens=[stop]).stream(draw(2, 8), max_new_tokens=12))
    assert stopped == expected[: expected.index(stop) + 1]


def test_a_token_that_the_next_text_drops_is_not_penalized():
    """Neither the repetition penalty nor a function of logits knows it, unless the text has it elsewhere."""
    model = make()

    def avoid_text(logits, text):
        rows = np.arange(len(logits))[:, None]
        return logits.at[rows, jax.numpy.where(text.tokens < 0, VOCAB, text.tokens)].add(-1.0, mode="drop")

    settings: list[dict[str, Any]] = [{"repetition_penalty": 5.0}, {"logits": avoid_text}]
    for options in settings:
        known = []
        for number in range(10):
            conversation = Conversation(model, **options)
            text = draw(number, 6)
            *answer, dropped = conversation.stream(text, max_new_tokens=4)
            question = [dropped] if number % 2 else [token for token in (1, 2) if token != dropped]
            text = [*text, *answer, 3, *question]
            known.append(dropped in text)
            assert list(conversation.stream(text, max_new_tokens=8)) == generate(model, text, 8, **options)
        assert set(known) == {False, True}


def test_another_text_and_a_longer_one_are_read_anew(count_read):
    model = make()
    conversation = Conversation(model)
    text = draw(4, 10)
    list(conversation.stream(text, max_new_tokens=3))
    other = [*text[:6], *draw(5, 6)]
    assert list(conversation.stream(other, max_new_tokens=3)) == generate(model, other, 3)
    longer = [*other, *draw(6, 200)]
    assert list(conversation.stream(longer, max_new_tokens=3)) == generate(model, longer, 3)
    assert count_read == [10, 12, 212]


def test_repetition_of_earlier_turns_is_penalized():
    model = make()
    conversation = Conversation(model, repetition_penalty=5.0)
    text = draw(1, 9)
    for turn, count in enumerate((4, 7)):
        new = list(conversation.stream(text, max_new_tokens=count))
        assert new == generate(model, text, count, repetition_penalty=5.0)
        text = [*text, *new, *draw(turn, 6)]


def test_samples_of_turns_have_keys_of_their_own():
    options = {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1, "key": jax.random.key(3)}
    text = draw(7, 6)
    first = Conversation(make(), **options)
    second = Conversation(make(), **options)
    runs = [list(conversation.stream(text, max_new_tokens=8)) for conversation in (first, second, first)]
    assert runs[0] == runs[1] != runs[2]
    with pytest.raises(ValueError, match="temperature"):
        Conversation(make(), temperature=1.0)


@pytest.mark.ci
def test_turns_on_a_mesh():
    model = make()
    mesh = zoo.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    conversation = Conversation(zoo.place(model, mesh), mesh=mesh)
    text = draw(8, 9)
    for turn in range(2):
        new = list(conversation.stream(text, max_new_tokens=4))
        assert new == generate(model, text, 4)
        text = [*text, *new, *draw(turn, 5)]


@pytest.mark.parametrize("name", ["gemma3_image", "llava_clip"])
def test_images_are_read_once(name, count_read, monkeypatch):
    """With the first turn, again where the caches are too short, and with a turn that brings others."""
    model = zoo.load(FIXTURES / name)
    images = jax.random.normal(jax.random.key(0), (1, 1, 3, *MORE[name][1:]))
    text = [4, 6, *[model.image_tokens[0]] * MORE[name][0], 9]
    looked = []
    read = module.read_images
    monkeypatch.setattr(
        module, "read_images", lambda *args, **rest: looked.append(args[1].shape[1]) or read(*args, **rest)
    )
    conversation = Conversation(model)
    for turn, count in enumerate((4, 7, 130)):
        new = list(conversation.stream(text, max_new_tokens=count, images=images))
        assert new == generate(model, text, count, images=images)
        assert conversation.held == (*text, *new[:-1])
        assert generate(model, text, count, images=-images) != new
        text = [*text, *new, 5, 7 + turn]
    assert count_read == [3] and looked == [len(text) - 147, len(text) - 132], "the third turn has a longer cache"
    assert list(conversation.stream(text, max_new_tokens=4, images=-images)) == generate(model, text, 4, images=-images)
    assert len(looked) == 3
    with pytest.raises(ValueError, match="and its images have 0 features"):
        next(conversation.stream(text, max_new_tokens=4))


def test_images_in_a_conversation_that_cannot_read_them():
    with pytest.raises(TypeError, match="images: Decoder reads texts only"):
        next(Conversation(make()).stream([3], max_new_tokens=1, images=np.zeros((1, 1, 3, 4, 4))))
    model = zoo.load(FIXTURES / "paligemma_image")
    text = [model.image_tokens[0]] * 4
    for tokens, images in ((text, np.ones((1, 1, 3, 8, 8), np.float32)), ([3, 4], None)):
        with pytest.raises(NotImplementedError, match="this model reads its prompt in both directions"):
            next(Conversation(model).stream(tokens, max_new_tokens=1, images=images))
    with pytest.raises(TypeError, match=r"not by ImageText: model.decoder is its Decoder of texts"):
        zoo.prefill(model, np.array([[3]]))


@pytest.mark.slow
def test_images_are_read_on_a_mesh():
    model = zoo.load(FIXTURES / "gemma3_image")
    mesh = zoo.make_mesh(tensor=2, fsdp=2, devices=jax.devices()[:4])
    images = jax.random.normal(jax.random.key(0), (1, 1, 3, 16, 16))
    conversation = Conversation(zoo.place(model, mesh), mesh=mesh)
    text = [4, 6, *[model.image_tokens[0]] * 4, 9]
    for _ in range(2):
        new = list(conversation.stream(text, max_new_tokens=4, images=images))
        assert new == generate(model, text, 4, images=images)
        text = [*text, *new, 5]
