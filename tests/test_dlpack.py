"""Memory that JAX shares with NumPy and PyTorch on the CPU, by pointers: what docs/arrays.md says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def make_aligned(dtype=np.float32, shape=(16, 16), shift=0):
    """Memory of NumPy's that begins `shift` bytes after a multiple of 64."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    return raw[start : start + size].view(dtype).reshape(shape)


def shares(array, pointer):
    return array.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int8", "uint8", "bool", "complex64"])
def test_numpy_shares_both_ways(dtype):
    x = make_aligned(dtype)
    array = jnp.from_dlpack(x)
    assert array.dtype == dtype and shares(array, x.ctypes.data)
    assert np.from_dlpack(array).ctypes.data == x.ctypes.data


def test_numpy_copies_what_jax_cannot_hold():
    for wide, narrow in ((np.int64, jnp.int32), (np.float64, jnp.float32)):
        x = make_aligned(wide)
        array = jnp.from_dlpack(x)
        assert array.dtype == narrow and not shares(array, x.ctypes.data)
    unaligned = make_aligned(shift=4)
    assert not shares(jnp.from_dlpack(unaligned), unaligned.ctypes.data)
    with pytest.raises(ValueError, match="copy=False"):
        jnp.from_dlpack(unaligned, copy=False)
    aligned = make_aligned()
    assert not shares(jnp.array(jnp.from_dlpack(aligned)), aligned.ctypes.data)


def test_layouts_of_numpy():
    x = make_aligned(shape=(4, 8, 16))
    for view in (x.T, x.transpose(2, 0, 1), x[2:]):
        array = jnp.from_dlpack(view)
        assert shares(array, view.ctypes.data)
        np.testing.assert_array_equal(array, view)
    for view in (x[:, ::2], x[::-1], np.broadcast_to(x[0], (3, 8, 16)).copy()[:, :, ::2]):
        with pytest.raises(Exception, match="trivial .compact. striding"):
            jnp.from_dlpack(view)


def test_views_by_numpy_and_what_is_no_dlpack_dtype():
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        array = jnp.ones((16, 16), dtype)
        view = np.asarray(array)
        assert view.dtype == dtype and shares(array, view.ctypes.data) and not view.flags.writeable
        with pytest.raises((BufferError, RuntimeError)):
            np.from_dlpack(array)
        with pytest.raises(BufferError):
            jnp.from_dlpack(make_aligned(dtype))
    assert not np.from_dlpack(jnp.ones(4)).flags.writeable
    x = make_aligned()
    assert shares(jax.device_put(x), x.ctypes.data)
    assert not shares(jnp.asarray(x), x.ctypes.data) and not shares(jnp.array(x), x.ctypes.data)


def test_a_later_write_is_seen():
    x = make_aligned()
    array = jnp.from_dlpack(x)
    x[0, 0] = 7.0
    assert array[0, 0] == 7.0


def test_donation_leaves_shared_memory_as_it_is():
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = make_aligned()
    assert (increment(jnp.from_dlpack(x)) == 1).all() and (x == 0).all()
    array = jnp.zeros((16, 16)) * 1
    view = np.from_dlpack(array)
    assert (increment(array) == 1).all() and (view == 0).all()


TORCH_DTYPES = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int8 uint8 int16 int32 bool complex64".split()


@pytest.mark.neighbors("torch")
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_pytorch_shares_both_ways(dtype):
    import torch

    x = torch.zeros(64, 64, dtype=getattr(torch, dtype))
    array = jnp.from_dlpack(x)
    back = torch.from_dlpack(array)
    assert array.dtype == dtype and back.dtype == x.dtype
    assert shares(array, x.data_ptr()) and back.data_ptr() == x.data_ptr()


@pytest.mark.neighbors("torch")
def test_layouts_and_copies_of_pytorch():
    import torch

    x = torch.randn(4, 8, 16)
    for view in (x.transpose(0, 2), x.permute(2, 0, 1), x[2:]):
        array = jnp.from_dlpack(view)
        assert shares(array, view.data_ptr())
        np.testing.assert_array_equal(array, view.numpy())
    for view in (x[:, ::2], x[0, :1].expand(8, 16)):
        with pytest.raises(Exception, match="trivial .compact. striding"):
            jnp.from_dlpack(view)
    for wide, narrow in ((torch.int64, jnp.int32), (torch.float64, jnp.float32)):
        copied = torch.zeros(64, dtype=wide)
        assert jnp.from_dlpack(copied).dtype == narrow
    unaligned = torch.zeros(65)[1:]
    assert not shares(jnp.from_dlpack(unaligned), unaligned.data_ptr())
    with pytest.raises(BufferError, match="gradient"):
        jnp.from_dlpack(torch.ones(3, requires_grad=True))


@pytest.mark.neighbors("torch")
def test_writes_of_pytorch_and_donation():
    import torch

    x = torch.zeros(64, 64)
    array = jnp.from_dlpack(x)
    x[0, 0] = 7.0
    assert array[0, 0] == 7.0
    ours = jnp.zeros((64, 64)) * 1
    torch.from_dlpack(ours)[0, 0] = 5.0  # JAX takes its arrays for immutable, and cannot stop PyTorch
    assert ours[0, 0] == 5.0
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    theirs = torch.from_dlpack(ours)
    assert increment(array)[0, 0] == 8.0 and increment(ours)[0, 0] == 6.0
    assert x[0, 0] == 7.0 and theirs[0, 0] == 5.0
