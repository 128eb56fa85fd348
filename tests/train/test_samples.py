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
