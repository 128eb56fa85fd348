"""Continuations of prompts, by a model on any mesh."""

import dataclasses

import jax
import pytest

import zoo
from zoo import train

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
