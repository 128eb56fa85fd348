"""Flax's msgpack and Orbax's folders, read without Flax; damaged ones give one error and run nothing."""

import random

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from zoo import CheckpointError
from zoo.weights import read_msgpack, read_orbax

from .damage import catch_error, time_limit

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def pack_array(x, code=1):
    """An array as `flax.serialization` writes it."""
    x = np.asarray(x)
    return msgpack.ExtType(code, msgpack.packb((x.shape, x.dtype.name, x.tobytes())))


def pack_chunks(x, size):
    """An array in chunks, as `flax.serialization` writes one of more than 1 GiB."""
    number = lambda values: {str(n): value for n, value in enumerate(values)}
    chunks = [pack_array(x.reshape(-1)[start : start + size]) for start in range(0, x.size, size)]
    return {"__msgpack_chunked_array__": True, "shape": number(x.shape), "chunks": number(chunks)}


def test_every_kind_of_leaf_is_read():
    half = jnp.asarray(ARRAY, jnp.bfloat16)
    tree = {
        "params": {"kernel": pack_array(ARRAY), "half": pack_array(half), "scale": pack_array(np.ones(()))},
        "list": {"0": pack_array(np.float32(3), 3), "1": 7, "2": None, "3": "text"},
        "complex": msgpack.ExtType(2, msgpack.packb((1.0, 2.0))),
        "large": pack_chunks(ARRAY, 4),
        "empty": pack_array(np.zeros((0, 3))),
    }
    read = read_msgpack(msgpack.packb(tree))
    np.testing.assert_array_equal(read["params"]["kernel"], ARRAY)
    np.testing.assert_array_equal(read["large"], ARRAY)
    assert read["params"]["half"].dtype == jnp.bfloat16 and (read["params"]["half"] == ARRAY).all()
    assert read["params"]["scale"].shape == () and read["empty"].shape == (0, 3)
    assert read["list"] == {"0": np.float32(3), "1": 7, "2": None, "3": "text"} and read["complex"] == 1 + 2j


def test_flax_writes_what_is_read(tmp_path):
    serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")
    tree = {"a": {"kernel": jnp.asarray(ARRAY, jnp.bfloat16)}, "b": [jnp.ones(3), np.int32(4), 1j]}
    (tmp_path / "params.msgpack").write_bytes(serialization.to_bytes(tree))
    read = read_msgpack(tmp_path / "params.msgpack")
    assert (read["a"]["kernel"] == ARRAY).all() and read["a"]["kernel"].dtype == jnp.bfloat16
    assert (read["b"]["0"] == 1).all() and read["b"]["1"] == 4 and read["b"]["2"] == 1j


@pytest.mark.parametrize(
    "leaf, message",
    [
        (msgpack.ExtType(1, msgpack.packb(((2, 3), "object", b"x"))), "dtype 'object'; these are read: bfloat16, bool"),
        (msgpack.ExtType(1, msgpack.packb(((2, 3), "float32", b"x"))), r"shape \[2, 3\] in float32 has 1 bytes"),
        (msgpack.ExtType(1, msgpack.packb(((-1, 3), "float32", b""))), r"\[-1, 3\] is not a shape"),
        (msgpack.ExtType(1, msgpack.packb((2**40, "float32", b""))), "not iterable"),
        (msgpack.ExtType(5, b"code"), "an extension of type 5, and Flax writes the types 1, 2 and 3"),
        ({**pack_chunks(ARRAY, 4), "shape": {"0": 2**62}}, "have 6 numbers"),
        ({**pack_chunks(ARRAY, 4), "chunks": {"0": 3}}, "a chunk of a large array is not a vector"),
    ],
)
def test_damaged_leaves_are_refused(leaf, message):
    with pytest.raises(CheckpointError, match=f"(?s)cannot be read as what Flax writes: .*{message}"):
        read_msgpack(msgpack.packb({"params": leaf}))


def test_any_bytes_give_a_tree_or_one_error(tmp_path):
    good = msgpack.packb({"a": pack_array(ARRAY), "b": pack_chunks(ARRAY, 4), "c": msgpack.ExtType(2, b"\x92\x01\x02")})
    draw = random.Random(0)
    outcomes = set()
    with time_limit():
        for _ in range(2000):
            damaged = bytearray(good)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(len(good))] = draw.randrange(256)
            length = draw.choice([len(good), draw.randrange(len(good))])
            outcomes.add(catch_error(lambda data=bytes(damaged[:length]): read_msgpack(data)) is None)
        for data in (b"", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc1", b"\x81\x92\x01\x02\x03"):
            assert catch_error(lambda data=data: read_msgpack(data))
    assert outcomes == {True, False}
    for path in (tmp_path, tmp_path / "missing"):
        assert str(path) in catch_error(lambda path=path: read_msgpack(path))


def test_orbax_folders_are_read_as_numpy_arrays(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {"a/b": {"w": jnp.asarray(ARRAY, jnp.bfloat16)}, "list": [np.arange(3)], "step": 7}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step" / "params", tree)
    read = read_orbax(tmp_path / "step" / "params")
    assert type(read["a/b"]["w"]) is np.ndarray and read["a/b"]["w"].dtype == jnp.bfloat16
    assert (read["a/b"]["w"] == ARRAY).all() and (read["list"][0] == [0, 1, 2]).all() and read["step"] == 7
    with pytest.raises(CheckpointError, match="it has no _METADATA; pass one of its folders: params"):
        read_orbax(tmp_path / "step")
    (tmp_path / "step" / "params" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read by Orbax: "):
        read_orbax(tmp_path / "step" / "params")
