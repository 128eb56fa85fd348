"""The same tokens on every mesh as on one device, and no copy of a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.generate.decode import DecodeState, decode_until, prefill, unstack_layers
from zoo.generate.request import SamplingOptions
from zoo.parallel import Mesh, make_mesh, place
from zoo.parallel.spmd import _JITTED, OutputDims, SpmdProgram, run_jitted

MODEL_KEY, TEXT_KEY, DRAW_KEY = jax.random.split(jax.random.key(0), 3)
ROWS, SEQ, VOCAB = 3, 7, 96
DRAWN = {"temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3, "key": DRAW_KEY}
DRAWN |= {"stop_tokens": (3, 11, 12, 13, 14)}
MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 1, "tensor": 8},
    {"data": 1, "fsdp": 4, "tensor": 2},
]


@functools.cache
def born(**options):
    """Two kinds of layers, and fewer kv heads than some meshes have devices along `tensor`."""
    sizes = {"vocab": VOCAB, "embed": 32, "layers": 2, "heads": 8, "kv_heads": 2, "mlp": 32} | options
    return zoo.models.Transformer(**sizes, windows=(5, None), key=MODEL_KEY)


def write(model, rows=ROWS, **options):
    tokens = jax.random.randint(TEXT_KEY, (ROWS, SEQ), 0, 90)[:rows]
    mask = (jnp.arange(SEQ) >= jnp.array([[2], [0], [SEQ - 1]]))[:rows]
    return np.asarray(zoo.generate(model, tokens, max_new_tokens=12, mask=mask, **options))


@pytest.mark.parametrize("sizes", MESHES, ids=[str(make_mesh(**sizes)) for sizes in MESHES])
def test_drawn_tokens_are_those_of_one_device(sizes):
    """Three rows, which no mesh here but one divides; and a callback hears the same."""
    mesh = make_mesh(**sizes)
    model, expected = place(born(), mesh), write(born(), **DRAWN)
    assert (expected == -1).any() and (expected[:, -1] >= 0).any()
    assert (write(model, mesh=mesh, **DRAWN) == expected).all()
    heard = []
    write(model, mesh=mesh, callback=heard.append, **DRAWN)
    assert (np.stack(heard, 1) == expected).all()


def test_one_prompt_on_eight_devices_that_store_and_share_rows():
    """Greedy, a vocabulary that nothing divides, and parameters that lie split."""
    mesh = make_mesh(fsdp=8)
    assert (write(place(born(vocab=91), mesh), rows=1, mesh=mesh) == write(born(vocab=91), rows=1)).all()


def test_caches_lie_split_and_a_step_writes_them_in_place():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model, options = (
        place(born(kv_heads=4, head_dim=32), mesh),
        SamplingOptions.from_arguments(0, None, None, None, 1.2, (), VOCAB),
    )
    tokens, positions = jnp.zeros((8, 16), jnp.int32), jnp.broadcast_to(jnp.arange(16), (8, 16))
    on_mesh = lambda program: SpmdProgram(program, mesh, 1, OutputDims.from_tree(""))
    state = run_jitted(on_mesh(prefill), ((model, options, None),), (tokens, positions, jnp.arange(8), 2048))
    assert isinstance(state, DecodeState)
    cache = state.states[1].key
    assert cache.shape == (8, 4, 2048, 32) and cache.addressable_shards[0].data.shape == (2, 2, 2048, 32)
    assert state.seen is not None and state.seen.addressable_shards[0].data.shape == (2, VOCAB // 2)
    fixed = unstack_layers(model, mesh), options
    program = _JITTED[True].lower((on_mesh(decode_until), (fixed,)), (state, jnp.int32(9)), None).compile()
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    memory = program.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 2
    after = run_jitted(on_mesh(decode_until), (fixed,), (state, jnp.int32(9)), donate=True)
    assert after.states[1].key.sharding == cache.sharding and cache.is_deleted()


def test_layers_taken_out_of_their_stack_lie_as_the_layout_says():
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    model = unstack_layers(place(born(), mesh), mesh)
    specs = mesh.shardings(model)
    for x, sharding in zip(jax.tree.leaves(model), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_a_mesh_that_splits_the_sequence_is_refused():
    devices = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1, 1, 1, 8, 1), make_mesh().devices.axis_names)
    mesh = Mesh(devices, make_mesh().layout)
    with pytest.raises(NotImplementedError, match="does not shard seq, and this mesh has context=8"):
        write(born(), mesh=mesh)
