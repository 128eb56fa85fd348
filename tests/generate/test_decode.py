"""Generation where `context` shards KV caches and prompts: logits and tokens are those of one device."""

import functools
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo.layers import Attention, GatedDeltaNet, LatentAttention, TokenInfo
from zoo.layers.kv_cache import KeyValueCache, LatentCache
from zoo.ops.rotary import Rotary
from zoo.parallel import all_gather, scan, shard
from zoo.parallel.collectives import varying

KEY = jax.random.key(0)
ROWS, PIECE, PIECES, VOCAB, WINDOW = 4, 8, 3, 32, 5
SEQ = (PIECES + 1) * PIECE
MASK = np.arange(SEQ) >= np.array([[0], [3], [11], [23]])
FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
SIZES = {"vocab": VOCAB, "embed": 16, "layers": 2, "key": KEY}
LATENTS = partial(LatentAttention, latent=6, head_dim=4, value_dim=3, rotary=Rotary(2))
ATTENTION = partial(Attention, heads=4, kv_heads=2, rotary=Rotary(4), window=WINDOW, soft_cap=1.5, sinks=True)
DELTA = partial(GatedDeltaNet, heads=4)
MODELS = {
    "parallel blocks": partial(zoo.load, FIXTURES / "gpt_neox", dtype="float32"),
    "windows": partial(zoo.models.Transformer, **SIZES, heads=4, kv_heads=1, mlp=24, windows=(WINDOW, None)),
    "latents": partial(zoo.models.MixtureOfExperts, **SIZES, heads=4, mlp=12, experts=4, top=2, mixer=LATENTS),
    "hybrid": partial(zoo.models.Hybrid, **SIZES, mlp=24, pattern=[DELTA, ATTENTION]),
    "token shifts": partial(zoo.load, FIXTURES / "rwkv", dtype="float32"),
}
CASES = {
    "parallel blocks": {"context": 8},
    "windows": {"data": 2, "context": 2, "tensor": 2},
    "latents": {"fsdp": 2, "context": 4},
    "hybrid": {"context": 4, "tensor": 2},
    "token shifts": {"data": 2, "context": 4},
}


def read_and_decode(model, tokens, positions):
    """Logits of all tokens, and the states after them: pieces are read by the devices that share them, and the other
    tokens are decoded one by one."""
    tokens, positions = (all_gather(x, "seq", axis=1) for x in (tokens, positions))

    def read(states, piece):
        tokens, positions = (shard(x, "seq", axis=1) for x in piece)
        hidden, states = model.hidden(tokens, TokenInfo(positions), states)
        assert varying(hidden.x) >= varying(tokens)
        return states, model.logits(all_gather(hidden.x, "seq", axis=1))

    def decode(states, token):
        tokens, positions = token
        hidden, states = model.hidden(tokens[:, None], TokenInfo(positions[:, None]), states)
        return states, model.logits(hidden.x[:, 0])

    first = PIECES * PIECE
    pieces = [x[:, :first].reshape(len(x), PIECES, PIECE).swapaxes(0, 1) for x in (tokens, positions)]
    states, before = scan(read, model.init_state(len(tokens), SEQ), tuple(pieces))
    states, after = scan(decode, states, tuple(x[:, first:].T for x in (tokens, positions)))
    before = before.swapaxes(0, 1).reshape(len(tokens), first, -1)
    return jnp.concatenate([before, after.swapaxes(0, 1)], axis=1), states


@functools.cache
def run_on_mesh(kind, axes):
    """Return the model, tokens, positions, and logits and states of `read_and_decode` on a mesh; on None of one."""
    model, tokens = MODELS[kind](), jax.random.randint(KEY, (ROWS, SEQ), 0, VOCAB)
    positions = jnp.asarray(np.cumsum(MASK, axis=1) * MASK - 1)
    if axes is None:
        return model, tokens, positions, *eqx.filter_jit(read_and_decode)(model, tokens, positions)
    mesh = zoo.make_mesh(**{"data": 1, **dict(axes)})
    run = zoo.spmd(read_and_decode, mesh, out=("batch seq vocab", ""))
    return model, tokens, positions, *run(zoo.place(model, mesh), tokens, positions)


@pytest.mark.ci
@pytest.mark.parametrize("kind", mark_slow(CASES, but=("hybrid",)))
def test_logits_equal_one_device_and_caches_are_shared(kind):
    sizes = CASES[kind]
    model, tokens, positions, found, states = run_on_mesh(kind, tuple(sizes.items()))
    expected = eqx.filter_jit(lambda model, tokens, mask: model(tokens, mask=mask))(model, tokens, jnp.asarray(MASK))
    assert np.allclose(found[MASK], expected[MASK], atol=1e-5)

    is_cache = lambda x: isinstance(x, KeyValueCache | LatentCache)
    caches = [x for x in jax.tree.leaves(states, is_leaf=is_cache) if is_cache(x)]
    assert len(caches) == {"hybrid": 1, "token shifts": 0}.get(kind, 2)
    for cache in caches:
        slots = cache.positions.shape[1]
        is_windowed = kind == "hybrid" or (kind == "windows" and cache is caches[0])
        count = WINDOW if is_windowed else SEQ
        assert slots == -(-count // sizes["context"]) * sizes["context"]
        assert np.array_equal(np.sort(cache.positions[:, -slots:]), np.sort(positions[:, -slots:]))
        arrays = (cache.features,) if isinstance(cache, LatentCache) else (cache.key, cache.value)
        assert all(shard.data.shape[-2] == slots // sizes["context"] for x in arrays for shard in x.addressable_shards)


@pytest.mark.slow
def test_a_cache_is_the_same_array_on_any_mesh():
    kind = "parallel blocks"
    alone, shared = (run_on_mesh(kind, axes)[-1] for axes in (None, tuple(CASES[kind].items())))
    for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(shared), strict=True):
        assert x.shape == y.shape and np.allclose(x, y, atol=1e-5)


@pytest.mark.slow  # the logits are compared above
def test_generates_the_tokens_of_one_device():
    """Greedily, from prompts of three lengths that are read in several pieces."""
    model, mesh = MODELS["hybrid"](), zoo.make_mesh(**{"data": 1, **CASES["hybrid"]})
    tokens = jax.random.randint(KEY, (3, 100), 0, VOCAB)
    mask = jnp.arange(100) >= jnp.array([[71], [0], [99]])
    options = {"max_new_tokens": 28, "mask": mask}
    expected = zoo.generate(model, tokens, **options)
    assert len(np.unique(expected)) > 8
    assert np.array_equal(zoo.generate(zoo.place(model, mesh), tokens, mesh=mesh, **options), expected)
