"""Damage checkpoints, and load them: helpers of the tests that expect one clear error."""

import contextlib
import json
import shutil
import signal

import jax
import numpy as np

import zoo
from scripts.attack.mutations import CONFIG, INDEX, WHOLE, build_arrays, parse_tensors, read_arrays
from scripts.attack.mutations import build_tensors as build_file

__all__ = ["CONFIG", "INDEX", "WHOLE", "build_file"]

TIMEOUT, MAX_MESSAGE = 20, 2000
QUERY = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
LLAMA = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 1}
ONE_LAYER = {"num_hidden_layers": 1, "intermediate_size": 12}
GPT2 = {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6}


def catch_error(run):
    """Return the message of the `CheckpointError` that `run` raises, None if it raises nothing."""
    try:
        run()
    except zoo.CheckpointError as error:
        text = str(error)
        assert type(error) is zoo.CheckpointError and isinstance(error, ValueError)
        assert text.strip() and len(text) < MAX_MESSAGE, f"{len(text)} characters: {text[:300]}"
        text.encode()  # it can be printed
        return text
    return None


@contextlib.contextmanager
def labeled(label):
    try:
        yield
    except BaseException as error:
        error.add_note(f"damage: {str(label)[:200]}")
        raise


@contextlib.contextmanager
def time_limit():
    def stop(*_):
        raise AssertionError(f"longer than {TIMEOUT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bits_of(model):
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(model)]


def parse_file(path):
    """Return the header of a safetensors file as a dict, and its data."""
    return parse_tensors(path.read_bytes())


def alter(source, path, name, content):
    """Copy a checkpoint with one file changed, or removed (None)."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def alter_tensors(source, path, change):
    """Copy a checkpoint with the tensors that `change` has altered; the header stays consistent."""
    arrays = read_arrays((source / WHOLE).read_bytes())
    change(arrays)
    return alter(source, path, WHOLE, build_arrays(arrays))
