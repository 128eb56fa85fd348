"""Held-out prompts are spread over the split and answered greedily; rewards read the prompt and the record's fields."""

import jax
import numpy as np
import pytest

from zoo import train
from zoo.text import ChatTemplate
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.tokenizers import ByteTokenizer
from zoo.train.reinforcement import group_sampler
from zoo.train.reinforcement.grouped_samples import Samples


@pytest.fixture
def sampler(tmp_path, monkeypatch, no_type_checks):
    """A sampler that answers every prompt with its first two characters, and the end; its calls, and their keys."""
    calls = []
    keys = []

    def answer(model, prompts, *, samples, temperature, key, **options):
        calls.append((len(prompts["tokens"]), samples, temperature))
        keys.append(key)
        first = [tokens[mask][1:3] for tokens, mask in zip(prompts["tokens"], prompts["mask"], strict=True)]
        tokens = np.array([[*text, 0, -1] for text in first for _ in range(samples)])
        return Samples(tokens, np.zeros(tokens.shape, np.float32))

    monkeypatch.setattr(group_sampler, "make_sampler", lambda model, mesh, dtype: model)
    monkeypatch.setattr(group_sampler, "sample_groups", answer)
    records = [{"prompt": f"{n:02} apples", "answer": f"{n:02}", "n": n} for n in range(40)]
    data = train.load_records(records, tokenizer=ByteTokenizer(), seq_len=10, validation=0.5, cache=tmp_path)
    assert len(data.validation.rows) > 10 and (data.unit, data.metric) == ("reward", "reward")

    def even(texts, records):
        assert all(record["prompt"] == f"{record['n']:02} apples" for record in records)
        return [int(text) % 2 for text in texts]

    rewards = train.Rewards({"exact": train.match_answer, "even": even}, {"even": 2.0})
    return train.GroupSampler(data, rewards, mesh=None, max_new_tokens=4, temperature=0.7), calls, keys


def test_evaluation_is_spread_and_greedy(sampler):
    sampler, calls, keys = sampler
    values, texts = sampler.evaluate(None, limit=7, batch_size=4)
    assert calls == [(4, 1, 0.0), (3, 1, 0.0)] and keys == [None, None]
    numbers = [int(text) for _, text in texts]
    assert [prompt for prompt, _ in texts] == [f"{n:02} apples" for n in numbers]
    held_out = [int(sampler.data.validation.read_fields(row["record"])["n"]) for row in sampler.data.validation.rows]
    assert numbers == [held_out[i * len(held_out) // 7] for i in range(7)]
    odd = np.mean([n % 2 for n in numbers])
    assert values["validation"] == pytest.approx(1 + 2 * odd) and values["validation_solved"] == pytest.approx(odd)
    assert len(sampler.evaluate(None, limit=1000, batch_size=1000)[1]) == len(held_out)


def test_answers_to_messages_are_shown_with_the_question_only(sampler, tmp_path):
    sampler, _, _ = sampler
    asked = [f"{n:02} + 1?" for n in range(40)]
    records = [{"prompt": [{"role": "user", "content": text}], "n": text[:2]} for text in asked]
    template = ChatTemplate(PLAIN_TEMPLATE, {"eos_token": "\0"})
    options = {"tokenizer": ByteTokenizer(), "template": template, "seq_len": 40, "cache": tmp_path}
    data = train.load_records(records, **options)
    rewards = train.Rewards({"whole": lambda texts, records: [float("User:" in r["prompt"]) for r in records]})
    sampler = train.GroupSampler(data, rewards, mesh=None, max_new_tokens=4, temperature=0.7)
    values, texts = sampler.evaluate(None, limit=2, batch_size=2)
    assert values["validation"] == 1 and all(prompt.removesuffix("\n") in asked for prompt, _ in texts)


def test_draws_end_once_the_batch_is_full(sampler):
    """All answers to a prompt are equal here, and so are their rewards: no draw has a signal. No two have one key."""
    sampler, calls, keys = sampler
    batches = sampler.data.train.batches(3, seed=0, process=(0, 1))
    groups = sampler.sample(None, next(batches), samples=2, key=jax.random.key(0), more=[next(batches), next(batches)])
    assert calls == [(3, 2, 0.7)] * 3
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 3
    assert groups.metrics["draws"] == 3 and groups.metrics["no_signal"] == 1
    assert groups.rewards.shape == (3, 2) and len(groups.samples.tokens) == 6
    assert groups.metrics["length"] == 3 and groups.metrics["unfinished"] == 0


def test_prompts_that_are_all_too_long_say_so(tmp_path):
    records = [{"prompt": f"{n} apples"} for n in range(40)]
    data = train.load_records(records, tokenizer=ByteTokenizer(), seq_len=4, validation=0.5, cache=tmp_path)
    with pytest.raises(ValueError, match=r"the train split has no rows: its prompts are longer than a row \(--prompt"):
        data.train.batches(2)
