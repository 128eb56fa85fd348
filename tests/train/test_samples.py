"""Continuations of prompts, by a model on any mesh."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import zoo
from zoo import train
from zoo.text import ChatTemplate
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.tokenizers import ByteTokenizer

PROMPTS = ["a", "abc"]


@pytest.mark.slow
def test_pipelined_model_samples_as_on_one_device():
    corpus = train.load_text({str(number): "abc " * number for number in range(1, 40)})
    model = zoo.models.Transformer(vocab=256, embed=16, layers=4, heads=4, mlp=32, key=jax.random.key(0))

    def sample(mesh):
        placed = zoo.place(model, mesh)
        options = {"key": jax.random.key(1), "max_new_tokens": 4}
        return train.continue_prompts(placed, corpus, PROMPTS, mesh=mesh, **options)

    expected = sample(zoo.make_mesh(devices=jax.devices()[:1]))
    layout = dataclasses.replace(zoo.parallel.ZERO2, rounds=2)
    assert sample(zoo.make_mesh(pipe=2, fsdp=2, tensor=2, layout=layout)) == expected
    assert [prompt for prompt, _ in expected] == PROMPTS


def test_samples_end_at_stop_strings():
    corpus = train.load_text({str(number): "abc " * number for number in range(1, 40)})
    model = zoo.models.Transformer(vocab=256, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    options = {"mesh": mesh, "key": jax.random.key(1), "max_new_tokens": 12, "samples": 2}
    plain = train.continue_prompts(model, corpus, PROMPTS, **options)
    assert [prompt for prompt, _ in plain] == ["a", "a", "abc", "abc"]
    assert len({text for _, text in plain}) == 4
    stop = (plain[1][1][4:6], plain[2][1][3])
    ended = train.continue_prompts(model, corpus, PROMPTS, stop=stop, **options)
    cut = [min(text.find(each) % 1000 for each in stop) for _, text in plain]
    assert [text for _, text in ended] == [text[:size] for (_, text), size in zip(plain, cut, strict=True)]


TEMPLATE = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})


def load(records, **options):
    return train.load_records(records, tokenizer=ByteTokenizer(), template=TEMPLATE, seq_len=96, **options)


def make_chat(question, answer, *, system=()):
    turns = [*[("system", text) for text in system], ("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_prompts_of_the_data_are_held_out_and_bare(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = load([make_chat(f"{number} + 1?", f"{number + 1}") for number in range(200)])
    prompts = train.find_prompts(data)
    assert len({prompt.text for prompt in prompts}) == 3
    held_out = [data.tokenizer.decode(row["tokens"]) for row in data.validation.rows]
    for prompt in prompts:
        assert prompt.text.endswith(" + 1?") and prompt.text[0].isdigit()
        assert prompt.tokens.tolist() == data.encode_prompt(prompt.text).tolist()
        assert any(f"{prompt.text}\n" in row for row in held_out)
    pairs = [{"prompt": f"{number}", "chosen": "yes", "rejected": "no"} for number in range(200)]
    assert all(prompt.text.isdigit() for prompt in train.find_prompts(load(pairs)))
    texts = load([{"text": f"{number} bottles of beer on the wall"} for number in range(50)])
    (text,) = train.find_prompts(texts, 1)
    assert re.fullmatch(r"\d+ bottles of \w*", text.text) and len(text.tokens) == 16
    with pytest.raises(ValueError, match="the validation split has no rows"):
        train.find_prompts(load([{"text": "a b c"}]))


def test_a_prompt_keeps_the_turns_before_its_question(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chats = [make_chat(f"{number} + 1?", "2", system=["Calculate."]) for number in range(40)]
    (prompt,) = train.find_prompts(load(chats), 1)
    assert prompt.text.startswith("System:\nCalculate.") and prompt.text.endswith(" + 1?")
    assert b"Assistant:\n" in bytes(prompt.tokens.tolist())


def test_prompts_of_the_data_are_continued_from_their_tokens(monkeypatch):
    seen = []

    def generate(model, tokens, *, max_new_tokens, mask, **options):
        seen.extend(np.asarray(row)[np.asarray(valid)].tolist() for row, valid in zip(tokens, mask, strict=True))
        return np.full((len(tokens), max_new_tokens), ord("x"))

    monkeypatch.setattr("zoo.train.samples.generate", generate)
    corpus = train.load_text({str(number): "abc " * number for number in range(1, 40)})
    prompts = ["ab", train.samples.HeldOutPrompt("shown", np.array([1, 2, 3]))]
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    found = train.continue_prompts(None, corpus, prompts, mesh=mesh, key=jax.random.key(0), max_new_tokens=2)
    assert found == [("ab", "xx"), ("shown", "xx")] and seen == [[0, 97, 98], [1, 2, 3]]
