"""Attention to a cache that devices share: bytes of a merge, updates in place, layouts, refusals."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.layers.random_layers import activations, randomize
from zoo import Layout
from zoo.layers import Attention, GatedDeltaNet, TokenInfo
from zoo.layers.abstract import run_mixer
from zoo.ops.attention import reference_attention
from zoo.ops.rotary import Rotary
from zoo.parallel import all_gather, shard

ROWS, EMBED, HEADS, SIZE, SEQ, SHARDS, LENGTH = 2, 16, 4, 4, 20, 4, 4096
OPTIONS = {"kv_heads": 2, "head_dim": SIZE, "rotary": Rotary(4), "window": 6, "soft_cap": 1.5, "sinks": True}


def make_mesh(**rows):
    return zoo.make_mesh(data=1, context=SHARDS, devices=jax.devices()[:SHARDS], layout=Layout().with_dims(**rows))


def compile_step(seq, length, out):
    """Compile a call with a donated cache on four devices, for shapes; tokens are sharded unless there is one."""
    mesh, mixer = make_mesh(), Attention(EMBED, HEADS, kv_heads=2, key=jax.random.key(0))
    state = zoo.place(eqx.filter_eval_shape(lambda: mixer.init_state(ROWS, length)), mesh)

    def run(mixer, new, state):
        take = lambda x: x if seq == 1 else shard(x, "seq", axis=1)
        return mixer(take(new["x"]), TokenInfo(take(new["places"])), state)

    new = {"x": jax.ShapeDtypeStruct((ROWS, seq, EMBED), "f4"), "places": jax.ShapeDtypeStruct((ROWS, seq), "i4")}
    call = eqx.filter_jit(zoo.spmd(run, mesh, out=out), donate="all-except-first")
    program = zoo.inspect.compiled(call, mixer, new, state)
    assert {row.axes for row in program.collectives} == {("context",)}
    return program, {row.kind: row.bytes for row in program.collectives}


@pytest.fixture(scope="module")
def step():
    """A decode step."""
    return compile_step(1, LENGTH, "batch new embed")


def test_merges_move_the_bytes_of_their_formula(step):
    """Float32 sums of values and of weights, and maxima, whatever the length of the cache; for a piece of a prompt also
    queries, keys, values and positions."""
    token = 4 * HEADS * (SIZE + 2)
    assert step[1] == {"all-reduce": ROWS * token}
    _, moved = compile_step(8, 64, "batch seq embed")
    assert moved["reduce-scatter"] + moved["all-reduce"] == ROWS * 8 * token
    assert moved["all-gather"] == ROWS * 8 * 4 * (HEADS * SIZE + 2 * 2 * SIZE + 1)


def test_decoding_updates_a_shard_of_the_cache_in_place(step):
    cache = ROWS * LENGTH * (2 * 2 * SIZE + 1) * 4
    memory = step[0].memory
    assert cache / SHARDS <= memory.aliased < 1.01 * cache / SHARDS
    assert memory.temporaries < cache / SHARDS / 2


def run_pieces(mixer, x, positions):
    """Outputs of two pieces, whose tokens are sharded if the layout shards `seq`, and of a third on every device."""
    x, positions = (all_gather(array, "seq", axis=1) for array in (x, positions))
    state, outputs = mixer.init_state(ROWS, SEQ), []
    for start, stop in ((0, 8), (8, 16)):
        piece, places = (shard(array[:, start:stop], "seq", axis=1) for array in (x, positions))
        y, state = run_mixer(mixer, piece, TokenInfo(places), state)
        outputs.append(all_gather(y, "seq", axis=1))
    y, state = run_mixer(mixer, x[:, 16:], TokenInfo(positions[:, 16:]), state)
    return jnp.concatenate([*outputs, y], axis=1)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "rows",
    [{}, pytest.param({"slots": ()}, marks=pytest.mark.slow), {"seq": (), "tokens": (), "key_seq": ()}],
    ids=["tokens and slots", "tokens", "slots"],
)
def test_pieces_equal_one_device_whatever_is_sharded(rows):
    """A window that wraps around in a piece, with sinks, a soft cap and shared KV heads."""
    mixer, x = randomize(partial(Attention, EMBED, HEADS, **OPTIONS)), activations(ROWS, SEQ, EMBED)
    positions = jnp.broadcast_to(jnp.arange(SEQ), (ROWS, SEQ))
    expected, _ = eqx.filter_jit(mixer)(x, TokenInfo())
    found = zoo.spmd(run_pieces, make_mesh(**rows), out="batch new embed")(mixer, x, positions)
    assert jnp.abs(found - expected).max() <= 1e-5 * jnp.abs(expected).max()


def trace(call, mixer):
    """Trace a call with a state, for a piece whose tokens are sharded."""
    positions = jnp.zeros((ROWS, SEQ), int)
    run = lambda mixer, x, positions: call(mixer, x, TokenInfo(positions), mixer.init_state(ROWS, SEQ))[0]
    return eqx.filter_eval_shape(
        zoo.spmd(run, make_mesh(), out="batch seq embed"), mixer, activations(ROWS, SEQ, EMBED), positions
    )


def test_shared_caches_refuse_by_name():
    mixer = Attention(EMBED, HEADS, key=jax.random.key(0))
    with pytest.raises(ValueError, match="no implementation 'reference': there are auto, grouped, blockwise"):
        trace(run_mixer, zoo.set_implementations(mixer, attention="reference"))
    with pytest.raises(ValueError, match="log-sum-exp, which reference_attention does not return: use auto, grouped"):
        trace(run_mixer, Attention(EMBED, HEADS, implementation=reference_attention, key=jax.random.key(0)))
    assert trace(run_mixer, zoo.set_implementations(mixer, attention="blockwise")).shape == (ROWS, SEQ, EMBED)


def test_recurrent_states_need_all_new_tokens():
    """A recurrent mixer by itself refuses a shard of them; `run_mixer` gathers them."""
    mixer = GatedDeltaNet(EMBED, HEADS, key=jax.random.key(0))
    with pytest.raises(NotImplementedError, match="all of its new tokens, and context shards them: .*run_mixer"):
        trace(lambda mixer, *args: mixer(*args), mixer)
    assert trace(run_mixer, mixer).shape == (ROWS, SEQ, EMBED)
