"""Damage checkpoints, and load them: helpers of the tests that expect one clear error."""

import contextlib
import json
import shutil
import signal

import jax
import numpy as np

import zoo
from zoo.weights.safetensors import DTYPES

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
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
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def build_file(header, data, *, padding=b""):
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + padding
    return len(text).to_bytes(8, "little") + text + data


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
    header, data = parse_file(source / WHOLE)
    header.pop("__metadata__", None)
    arrays = {}
    for name, facts in header.items():
        start, stop = facts["data_offsets"]
        arrays[name] = np.frombuffer(data[start:stop], DTYPES[facts["dtype"]]).reshape(facts["shape"])
    change(arrays)
    codes, header, end = {dtype: code for code, dtype in DTYPES.items()}, {}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    return alter(source, path, WHOLE, build_file(header, b"".join(x.tobytes() for x in arrays.values())))
