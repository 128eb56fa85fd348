"""Generation on a mesh gives the tokens of one device, with sharded KV caches that are updated in place."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import make_mesh, place
from zoo.generate.buckets import pad_prompt
from zoo.generate.decode import DecodeState, begin, decode_until, unstack_layers
from zoo.generate.request import DecodeOptions, Sampling
from zoo.parallel import Mesh
from zoo.parallel.spmd import _JITTED, OutputDims, SpmdProgram, run_jitted

MODEL_KEY, TEXT_KEY, DRAW_KEY = jax.random.split(jax.random.key(0), 3)
ROWS, SEQ, VOCAB = 3, 7, 96
SAMPLING = {"temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3, "key": DRAW_KEY}
SAMPLING |= {"stop_tokens": (3, 11, 12, 13, 14)}
MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 1, "tensor": 8},
    {"data": 1, "fsdp": 4, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2},
]


@functools.cache
def make_model(**options):
    """A model with sliding-window and full attention, and fewer kv heads than `tensor` has devices on some meshes."""
    sizes = {"vocab": VOCAB, "embed": 32, "layers": 2, "heads": 8, "kv_heads": 2, "mlp": 32} | options
    return eqx.filter_jit(functools.partial(zoo.models.Transformer, **sizes, windows=(5, None)))(key=MODEL_KEY)


def generate_tokens(model, rows=ROWS, **options):
    tokens = jax.random.randint(TEXT_KEY, (ROWS, SEQ), 0, 90)[:rows]
    mask = (jnp.arange(SEQ) >= jnp.array([[2], [0], [SEQ - 1]]))[:rows]
    return np.asarray(zoo.generate(model, tokens, max_new_tokens=12, mask=mask, **options))


@pytest.mark.slow  # test_decode.py compares logits on a mesh, and test_buckets.py samples
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: str(make_mesh(**sizes)))
def test_mesh_samples_equal_those_of_one_device(sizes):
    """Three rows, which only one of these meshes divides; a callback receives the same tokens."""
    mesh = make_mesh(**sizes)
    model, expected = place(make_model(), mesh), generate_tokens(make_model(), **SAMPLING)
    assert (expected == -1).any() and (expected[:, -1] >= 0).any()
    assert (generate_tokens(model, mesh=mesh, **SAMPLING) == expected).all()
    received = []
    generate_tokens(model, mesh=mesh, callback=received.append, **SAMPLING)
    assert (np.stack(received, 1) == expected).all()


@pytest.mark.slow
def test_fsdp_generates_one_prompt_on_eight_devices():
    """Greedy, with an indivisible vocabulary and parameters sharded at rest."""
    mesh = make_mesh(fsdp=8)
    assert (
        generate_tokens(place(make_model(vocab=91), mesh), rows=1, mesh=mesh)
        == generate_tokens(make_model(vocab=91), rows=1)
    ).all()


@pytest.mark.ci
def test_mesh_shards_caches_and_updates_them_in_place():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model, options = (
        place(make_model(kv_heads=4, head_dim=32), mesh),
        DecodeOptions.of(Sampling(repetition_penalty=1.2), VOCAB),
    )
    prompt = pad_prompt(jnp.zeros((4, 16), jnp.int32), None, 4, 2048)
    on_mesh = lambda program: SpmdProgram(program, mesh, 1, OutputDims.from_tree(""))
    state = run_jitted(on_mesh(begin), (model, options, DRAW_KEY), (prompt, 2048))
    assert isinstance(state, DecodeState)
    cache = state.states[1].key
    assert cache.shape == (4, 4, 2048, 32) and cache.addressable_shards[0].data.shape == (1, 2, 2048, 32)
    assert state.seen.addressable_shards[0].data.shape == (1, VOCAB)
    fixed = unstack_layers(model, mesh), options
    program = _JITTED[True].lower((on_mesh(decode_until), fixed), (state, jnp.int32(9)), None).compile()
    state_size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    memory = program.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state_size
    assert memory.temp_size_in_bytes < state_size / 2
    after = run_jitted(on_mesh(decode_until), fixed, (state, jnp.int32(9)), donate=True)
    assert after.states[1].key.sharding == cache.sharding and cache.is_deleted()


def test_unstacked_layers_keep_their_sharding():
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    model = unstack_layers(place(make_model(), mesh), mesh)
    specs = mesh.shardings(model)
    for x, sharding in zip(jax.tree.leaves(model), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_mesh_that_shards_layers_raises():
    devices = jax.sharding.Mesh(np.array(jax.devices()).reshape(8, 1, 1, 1, 1, 1), make_mesh().devices.axis_names)
    mesh = Mesh(devices, make_mesh().layout)
    with pytest.raises(NotImplementedError, match="does not shard layers, and this mesh has pipe=8"):
        generate_tokens(make_model(), mesh=mesh)
