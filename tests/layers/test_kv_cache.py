"""KV caches: a write pointer per row, padding that takes no slot, and rows with more tokens than a cache holds."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zoo
from zoo.layers import Attention, LatentAttention, TokenInfo
from zoo.layers.kv_cache import KeyValueCache, LatentCache, set_rope_length
from zoo.models import Stack
from zoo.models.hf.families.llama4_text_layers import ChunkedAttention
from zoo.models.stack import swap_stack
from zoo.ops.rotary import Rotary
from zoo.ops.sectioned_rotary import SectionedRotary

KEY = jax.random.key(3)
ROWS, WIDTH, TURNS, VOCAB = 3, 6, 4, 40
LENGTH = WIDTH * TURNS
MIXERS = {
    "window": partial(Attention, heads=2, rotary=Rotary(8), window=4),
    "chunk": partial(ChunkedAttention, heads=2, rotary=Rotary(8), chunk=4),
    "latent": partial(LatentAttention, heads=2, latent=6, head_dim=8, rotary=Rotary(4)),
    "full": partial(Attention, heads=2, rotary=Rotary(8)),
}
LEFT = np.arange(WIDTH) >= np.array([[0], [5], [6]])
"""A turn padded on the left: all of the first row, one token of the second, none of the third."""


@cache
def make_model(*names):
    """A model with weights so large that each key matters, and not so large that they amplify rounding."""
    model = zoo.models.Hybrid(
        vocab=VOCAB, embed=16, layers=len(names), mlp=16, pattern=[MIXERS[name] for name in names], key=KEY
    )
    return jax.tree.map(lambda x: 1.5 * x if eqx.is_inexact_array(x) else x, model)


def read(model, states, tokens, positions):
    hidden, states = model.hidden(tokens, TokenInfo(positions), states)
    return model.logits(hidden.x), states


@eqx.filter_jit
def read_turns(model, tokens, positions):
    """Read the turns one after the other, and the last token of the last turn by itself, as decoding does."""
    states, logits = model.init_state(ROWS, LENGTH), []
    for start, stop in [*((turn * WIDTH, (turn + 1) * WIDTH) for turn in range(TURNS - 1)), (-WIDTH, -1), (-1, None)]:
        part, states = read(model, states, tokens[:, start:stop], positions[:, start:stop])
        logits.append(part)
    return jnp.concatenate(logits, axis=1)


@eqx.filter_jit
def read_at_once(model, tokens, mask):
    return model(tokens, mask=mask)


def check_turns(run, model, is_real):
    """Compare the logits of real tokens with those of each row without padding between its turns."""
    tokens = np.random.default_rng(0).integers(1, VOCAB, (ROWS, LENGTH))
    positions = np.where(is_real, np.cumsum(is_real, axis=1) - 1, -1)
    found = np.asarray(run(model, jnp.asarray(tokens), jnp.asarray(positions)))
    counts = is_real.sum(axis=1)
    alone = np.zeros_like(tokens)
    for row, count in enumerate(counts):
        alone[row, :count] = tokens[row, is_real[row]]
    expected = np.asarray(read_at_once(model, jnp.asarray(alone), jnp.arange(LENGTH) < jnp.asarray(counts)[:, None]))
    tolerance = 2e-5 * np.abs(expected).max()
    for row, count in enumerate(counts):
        np.testing.assert_allclose(found[row, is_real[row]], expected[row, :count], rtol=0, atol=tolerance)


@given(seed=st.integers(0, 10**6), fraction=st.sampled_from([0.2, 0.5, 0.9]))
@example(seed=0, fraction=None)
def test_rows_of_turns_with_any_padding_equal_each_row_alone(seed, fraction):
    """Padding may be anywhere, and a row may have no token in a turn."""
    if fraction is None:
        is_real = np.concatenate([LEFT[::-1], LEFT, LEFT, LEFT[::-1]], axis=1)
    else:
        is_real = np.random.default_rng(seed).random((ROWS, LENGTH)) < fraction
    check_turns(read_turns, make_model(*MIXERS), is_real)


@pytest.mark.ci
def test_padded_turns_on_a_mesh_that_shards_slots():
    mesh = zoo.make_mesh(data=1, context=4, tensor=2)

    def run(model, tokens, positions):
        program = zoo.spmd(read_turns_of_shards, mesh, out="batch seq vocab")
        return program(zoo.place(model, mesh), tokens, positions)

    def read_turns_of_shards(model, tokens, positions):
        gather = partial(zoo.parallel.all_gather, dim="seq", axis=1)
        states, logits = model.init_state(ROWS, LENGTH), []
        tokens, positions = gather(tokens), gather(positions)
        for turn in range(TURNS):
            part = slice(turn * WIDTH, (turn + 1) * WIDTH)
            new, states = read(model, states, tokens[:, part], positions[:, part])
            logits.append(new)
        return jnp.concatenate(logits, axis=1)

    is_real = np.concatenate([LEFT[::-1], LEFT, LEFT, LEFT[::-1]], axis=1)
    check_turns(run, make_model("window", "full"), is_real)


def test_padding_takes_no_slot():
    positions = jnp.array([[-1, -1, 0, 1], [0, -1, 1, -1]])
    ones = jnp.arange(1.0, 5.0)[None, :, None, None] * jnp.ones((2, 1, 1, 2))
    state = KeyValueCache.empty(2, 3, 1, 2, jnp.float32, 8).write(ones, 2 * ones, positions)
    assert state.positions.tolist() == [[0, 1, -1], [0, 1, -1]] and state.written.tolist() == [2, 2]
    assert state.key[:, 0, :, 0].tolist() == [[3, 4, 0], [1, 3, 0]]
    later = jnp.array([[2, 3, 4, 5], [-1, -1, -1, 2]])
    state = state.write(5 * ones, ones, later)
    assert state.positions.tolist() == [[3, 4, 5], [0, 1, 2]] and state.written.tolist() == [6, 3]
    latent = LatentCache.empty(2, 2, jnp.float32, 8).write(ones[:, :, 0], positions)
    assert latent.positions[:, :3].tolist() == [[0, 1, -1], [0, 1, -1]] and latent.written.tolist() == [2, 2]


def test_a_device_writes_only_the_slots_that_it_holds():
    """Three tokens in a cache of eight slots: the slots of the second device stay empty."""
    mesh = zoo.make_mesh(1, context=2, devices=jax.devices()[:2])

    def write(features, positions):
        cache = LatentCache.empty(1, 1, jnp.float32, 8).write(features, positions)
        return zoo.parallel.all_gather(cache.positions, "slots", axis=1)

    found = zoo.spmd(write, mesh, out="")(jnp.ones((1, 4, 1)), jnp.array([[-1, 0, 1, 2]]))
    assert found.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("name, split", [("full", (9,)), ("full", (3, 3, 3)), ("latent", (4, 1))], ids=str)
def test_row_that_does_not_fit_raises_and_is_nan_under_jit(name, split):
    """One row of two has too many tokens for a cache of 4; the other has padding instead."""
    model = swap_stack(make_model("full", "full") if name == "full" else make_model(name), Stack.unstack)
    tokens = jnp.ones((2, sum(split)), int)
    positions = jnp.stack([jnp.arange(sum(split)), jnp.where(jnp.arange(sum(split)) < 1, 0, -1)])
    for program, raises in ((read, True), (eqx.filter_jit(read), False)):
        states, start = model.init_state(2, 4), 0
        for size in split:
            part = tokens[:, start : start + size], positions[:, start : start + size]
            start += size
            if raises and start > 4:
                with pytest.raises(ValueError, match=f"row 0 has {start} tokens, {size} of them new, and its .* 4: "):
                    program(model, states, *part)
                break
            logits, states = program(model, states, *part)
            assert jnp.isnan(logits[0]).all() == (start > 4)
            assert jnp.isfinite(logits[1]).all()


def test_stack_that_scans_raises_for_a_row_that_does_not_fit():
    model = zoo.configure(make_model("full", "full"), loop="scan")
    _, states = read(model, model.init_state(1, 4), jnp.ones((1, 3), int), jnp.arange(3)[None])
    with pytest.raises(ValueError, match="row 0 has 5 tokens, 2 of them new, and its cache holds 4"):
        read(model, states, jnp.ones((1, 2), int), jnp.arange(3, 5)[None])


def test_window_longer_than_its_cache_is_no_window():
    """A window of 4 streams through a cache for any length from 4 on; a cache for 3 tokens holds 3."""
    mixer = MIXERS["window"](16, key=KEY)
    x = jax.random.normal(KEY, (1, 9, 16))
    expected, _ = mixer(x, TokenInfo())
    for length in (4, 5):
        state, outputs = mixer.init_state(1, length), []
        for i in range(9):
            y, state = mixer(x[:, i : i + 1], TokenInfo(jnp.array([[i]])), state)
            outputs.append(y)
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), expected, atol=1e-5)
    with pytest.raises(ValueError, match="row 0 has 9 tokens"):
        mixer(x, TokenInfo(jnp.arange(9)[None]), mixer.init_state(1, 3))


def test_set_rope_length_changes_every_cache():
    states = make_model("window", "latent").init_state(1, 8)
    assert [int(state.rope_length) for state in states] == [8, 8]
    assert [int(state.rope_length) for state in set_rope_length(states, 5)] == [5, 5]


IMAGES = {  # coordinates of a prompt of four tokens, and where the next two stand
    "a text": ([0, 1, 2, 3], [4, 5]),
    "an image that is tall, and a token": ([(0, 0, 0), (0, 1, 0), (0, 2, 0), 3], [4, 5]),
    "an image of few rows and columns, and a token": ([(0, 0, 0), (0, 0, 1), (0, 1, 0), 2], [3, 4]),
    "an image that ends the prompt": ([0, (1, 1, 1), (1, 1, 2), (1, 1, 3)], [4, 5]),
    "an image that is tall and ends the prompt": ([0, (1, 1, 1), (1, 2, 1), (1, 3, 1)], [4, 5]),
    "padding": ([0, 0, 0, 0], [0, 1]),
}


def test_a_cache_goes_on_after_images():
    """Each row from a place of its own, and the mask counts tokens."""
    mixer = Attention(16, 2, rotary=SectionedRotary(8, sections=(2, 1, 1)), key=KEY)
    rows = [[np.broadcast_to(place, 3) for place in [*prompt, *new]] for prompt, new in IMAGES.values()]
    coordinates = jnp.asarray(rows, jnp.float32)
    positions = jnp.array([[0, 1, 2, 3, 4, 5]] * (len(IMAGES) - 1) + [[-1, -1, -1, -1, 0, 1]])
    x = jax.random.normal(KEY, (len(IMAGES), 6, 16))

    @jax.jit
    def run(x):
        empty = mixer.init_state(len(IMAGES), 6)
        wanted, _ = mixer(x, TokenInfo(positions, coordinates=coordinates), empty)
        y, state = mixer(x[:, :4], TokenInfo(positions[:, :4], coordinates=coordinates[:, :4]), empty)
        parts = [y]
        for place in (4, 5):  # as decoding does, without coordinates
            y, state = mixer(x[:, place, None], TokenInfo(positions[:, place, None]), state)
            parts.append(y)
        return wanted, jnp.concatenate(parts, axis=1), state

    wanted, found, state = run(x)
    assert state.rope_shift.tolist() == [0, 0, -1, 0, 0, 0]
    assert state.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * (len(IMAGES) - 1) + [[0, 1, -1, -1, -1, -1]]
    is_real = np.asarray(positions) >= 0
    np.testing.assert_allclose(found[is_real], wanted[is_real], atol=1e-5)
