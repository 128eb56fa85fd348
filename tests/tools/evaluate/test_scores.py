"""Two processes score shares of the rows, and both get the results of one."""

import json
import socket
import subprocess
import sys

import pytest

from tests.processes import make_environment
from tests.tools.evaluate.parity import FOLDER, TOLERANCE, list_requests


def answer_requests(process: int, port: int) -> list:
    """Return what a process of two gets: choices, documents and texts."""
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    import zoo
    from zoo.tools.evaluate import GenerationOptions, TextPrompt, load_language_model

    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    lm = load_language_model(FOLDER / "model", mesh=mesh, batch=4, length=64)
    choices = [lm.encode_pair(*pair) for pair, _ in list_requests("zoo_choice")]
    texts = [text for (text,), _ in list_requests("zoo_documents")]
    options = GenerationOptions(12, ("e", "\n"))
    prompts = [TextPrompt(lm.encode(text), options) for (text, _), _ in list_requests("zoo_questions")]
    return [lm.log_likelihoods(choices), lm.rolling_log_likelihoods(texts), lm.generate(prompts)]


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
