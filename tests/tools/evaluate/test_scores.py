"""Scores on a sharded vocabulary, and of two processes, which score shares of the rows and get the results of one."""

import json
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.processes import make_environment
from tests.tools.evaluate.parity import FOLDER, TOLERANCE, list_requests
from zoo.tools.evaluate import GenerationOptions, TextPrompt, load_language_model
from zoo.tools.evaluate.scores import score_targets


def answer_requests(process: int, port: int) -> list:
    """Return what a process of two gets: choices, documents and texts."""
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    lm = load_language_model(FOLDER / "model", mesh=mesh, batch=4, length=64)
    choices = [lm.encode_pair(*pair) for pair, _ in list_requests("zoo_choice")]
    texts = [text for (text,), _ in list_requests("zoo_documents")]
    options = GenerationOptions(12, ("e", "\n"))
    prompts = [TextPrompt(lm.encode(text), options) for (text, _), _ in list_requests("zoo_questions")]
    return [lm.log_likelihoods(choices), lm.rolling_log_likelihoods(texts), lm.generate(prompts)]


def test_the_likeliest_token_of_each_shard():
    model = zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0))
    tokens = jnp.broadcast_to(jnp.arange(8), (2, 8))
    logs = jax.nn.log_softmax(jax.jit(lambda model, tokens: model(tokens))(model, tokens))
    likeliest = logs[0].argmax(axis=-1)
    assert {0, 1} == set((likeliest // 4).tolist())
    batch = {"tokens": tokens, "targets": jnp.stack([likeliest, (likeliest + 4) % 8]), "numbers": jnp.arange(2)}
    mesh = zoo.make_mesh(data=1, tensor=2, devices=jax.devices()[:2])
    run = zoo.spmd(score_targets, mesh, out=("batch seq", "batch seq", "batch"))
    scores, is_likeliest, numbers = run(zoo.place(model, mesh), zoo.place_batch(batch, mesh))
    np.testing.assert_allclose(scores, jnp.take_along_axis(logs, batch["targets"][..., None], -1)[..., 0], atol=1e-5)
    assert is_likeliest[0].all() and not is_likeliest[1].any() and numbers.tolist() == [0, 1]


@pytest.mark.slow
def test_two_processes_get_the_results_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [[sys.executable, __file__, str(i), str(port)] for i in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=make_environment(4), **pipes) for command in words]
    try:
        ended = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    first, second = (json.loads(printed.splitlines()[-1]) for printed, _ in ended)
    assert first == second
    choices, documents, texts = first
    expected = [response for _, response in list_requests("zoo_choice")]
    assert [x for x, _ in choices] == pytest.approx([x for x, _ in expected], abs=TOLERANCE)
    assert [flag for _, flag in choices] == [flag for _, flag in expected]
    assert documents == pytest.approx([x for _, x in list_requests("zoo_documents")], abs=TOLERANCE)
    assert texts == [x for _, x in list_requests("zoo_questions")]


if __name__ == "__main__":
    print(json.dumps(answer_requests(int(sys.argv[1]), int(sys.argv[2]))))
