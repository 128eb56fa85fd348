"""Generation where `context` shards KV caches and prompts: logits and tokens are those of one device."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Attention, GatedDeltaNet, KeyValueCache, LatentAttention, LatentCache, TokenInfo
from zoo.ops.rotary import Rotary
from zoo.parallel import all_gather, scan, shard, varying

KEY = jax.random.key(0)
ROWS, PIECE, PIECES, VOCAB, WINDOW = 4, 8, 3, 32, 5
SEQ = (PIECES + 1) * PIECE
PADDING = np.array([[0], [3], [11], [23]])
SIZES = {"vocab": VOCAB, "embed": 16, "layers": 2, "key": KEY}
LATENTS = partial(LatentAttention, latent=6, head_dim=4, value_dim=3, rotary=Rotary(2))
ATTENTION = partial(Attention, heads=4, kv_heads=2, rotary=Rotary(4), window=WINDOW, soft_cap=1.5, sinks=True)
DELTA = partial(GatedDeltaNet, heads=4)
MODELS = {
    "dense": partial(zoo.models.Transformer, **SIZES, heads=4, kv_heads=2, mlp=24),
    "windows": partial(zoo.models.Transformer, **SIZES, heads=4, kv_heads=1, mlp=24, windows=(WINDOW, None)),
    "latents": partial(zoo.models.MixtureOfExperts, **SIZES, heads=4, mlp=12, experts=4, top=2, mixer=LATENTS),
    "hybrid": partial(zoo.models.Hybrid, **SIZES, mlp=24, pattern=[DELTA, ATTENTION]),
    "shifts": partial(zoo.models.RWKV6, **SIZES, heads=4, mlp=24),
}
CASES = [
    ("dense", {"context": 8}),
    ("windows", {"data": 2, "context": 2, "tensor": 2}),
    ("latents", {"fsdp": 2, "context": 4}),
    ("hybrid", {"context": 4, "tensor": 2}),
    ("shifts", {"data": 2, "context": 4}),
]


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


@pytest.mark.parametrize("kind, sizes", CASES, ids=[kind for kind, _ in CASES])
def test_logits_equal_one_device_and_caches_are_shared(kind, sizes):
    model, mesh = MODELS[kind](), zoo.make_mesh(**{"data": 1, **sizes})
    tokens, mask = jax.random.randint(KEY, (ROWS, SEQ), 0, VOCAB), np.arange(SEQ) >= PADDING
    positions = jnp.asarray(np.cumsum(mask, axis=1) * mask - 1)
    expected = eqx.filter_jit(lambda model, tokens, mask: model(tokens, mask=mask))(model, tokens, jnp.asarray(mask))
    run = zoo.spmd(read_and_decode, mesh, out=("batch seq vocab", ""))
    found, states = run(zoo.place(model, mesh), tokens, positions)
    assert np.allclose(found[mask], expected[mask], atol=1e-5)

    is_cache = lambda x: isinstance(x, KeyValueCache | LatentCache)
    caches = [x for x in jax.tree.leaves(states, is_leaf=is_cache) if is_cache(x)]
    assert len(caches) == {"hybrid": 1, "shifts": 0}.get(kind, 2)
    for cache in caches:
        slots = cache.positions.shape[1]
        is_windowed = kind == "hybrid" or (kind == "windows" and cache is caches[0])
        count = WINDOW if is_windowed else SEQ
        assert slots == -(-count // sizes["context"]) * sizes["context"]
        assert np.array_equal(np.sort(cache.positions[:, -slots:]), np.sort(positions[:, -slots:]))
        arrays = jax.tree.leaves((cache.features,) if isinstance(cache, LatentCache) else (cache.key, cache.value))
        assert all(shard.data.shape[-2] == slots // sizes["context"] for x in arrays for shard in x.addressable_shards)


@pytest.mark.parametrize("kind, sizes", [CASES[0], CASES[3]], ids=["dense", "hybrid"])
def test_generates_the_tokens_of_one_device(kind, sizes):
    """Greedily, from prompts of three lengths that are read in several pieces."""
    model, mesh = MODELS[kind](), zoo.make_mesh(**{"data": 1, **sizes})
    tokens = jax.random.randint(KEY, (3, 100), 0, VOCAB)
    mask = jnp.arange(100) >= jnp.array([[71], [0], [99]])
    options = {"max_new_tokens": 28, "mask": mask}
    expected = zoo.generate(model, tokens, **options)
    assert len(np.unique(expected)) > 8
    assert np.array_equal(zoo.generate(zoo.place(model, mesh), tokens, mesh=mesh, **options), expected)
