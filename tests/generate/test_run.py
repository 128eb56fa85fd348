"""Cached decoding equals uncached forward passes, and samples follow their distribution."""

import dataclasses
import functools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import zoo
from zoo.generate.buckets import pad_prompt
from zoo.layers import PositionEmbedding, TokenInfo
from zoo.layers.kv_cache import set_rope_length
from zoo.models import Stack
from zoo.models.stack import swap_stack
from zoo.ops.rotary import DynamicScaling, LongRopeScaling, Rotary
from zoo.ops.sampling import filter_logits

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 2, "heads": 4, "mlp": 24}
KINDS = {
    "full": {},
    "windows, shared keys, capped": {"windows": (4, None), "kv_heads": 2, "soft_cap": 5.0, "tied": False},
}
LENGTH = 48


@functools.cache
def make_model(**options):
    return zoo.models.Transformer(**SIZES | options, key=KEY)


def random_tokens(shape, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, SIZES["vocab"])


def left_padding_mask(shape, pads):
    return jnp.arange(shape[1]) >= jnp.minimum(jnp.array(pads), shape[1] - 1)[:, None]


@eqx.filter_jit
def forward_greedy(model, tokens, mask):
    return model(tokens, mask=mask).argmax(-1)


@pytest.mark.slow  # test_buckets.py::test_mixed_calls_compile_few_programs_and_are_exact holds it by default
@pytest.mark.parametrize("kind", KINDS)
@given(
    seq=st.sampled_from([1, 5, 16, 20]),
    new=st.sampled_from([1, 2, 17, 28]),
    pads=st.tuples(st.integers(0, 19), st.integers(0, 3), st.just(0)),
    seed=st.integers(0, 99),
)
def test_greedy_tokens_equal_those_of_a_full_forward_pass(kind, seq, new, pads, seed):
    """Prompts of different lengths, and more tokens than the windows hold. By induction one forward pass over the
    result shows that each token is the argmax after those before it."""
    model, tokens, mask = make_model(**KINDS[kind]), random_tokens((3, seq), seed), left_padding_mask((3, seq), pads)
    got = zoo.generate(model, tokens, max_new_tokens=new, mask=mask, length=LENGTH)
    assert got.shape == (3, new) and got.dtype == jnp.int32
    padding = jnp.zeros((3, LENGTH - seq - new), int)
    is_real = jnp.concatenate([padding, mask, jnp.ones((3, new), int)], 1).astype(bool)
    greedy = forward_greedy(model, jnp.concatenate([padding, tokens, got], 1), is_real)
    assert jnp.array_equal(greedy[:, LENGTH - new - 1 : -1], got)


@pytest.mark.slow
def test_generate_takes_bfloat16_and_unstacked_models():
    model = zoo.cast(make_model(), jnp.bfloat16)
    unstacked = swap_stack(model, Stack.unstack)
    tokens = random_tokens((2, 6))
    assert jnp.array_equal(*(zoo.generate(m, tokens, max_new_tokens=9) for m in (model, unstacked)))


@pytest.mark.slow
def test_generate_runs_under_jit():
    model, tokens = make_model(), random_tokens((2, 6))
    draw = lambda model, tokens, mask, key: zoo.generate(
        model, tokens, max_new_tokens=9, mask=mask, temperature=0.7, stop_tokens=[3], key=key
    )
    arguments = model, tokens, left_padding_mask((2, 6), (2, 0)), KEY
    assert jnp.array_equal(eqx.filter_jit(draw)(*arguments), draw(*arguments))
    with pytest.raises(ValueError, match="under jit there are none yet"):
        eqx.filter_jit(lambda *a: zoo.generate(*a, max_new_tokens=2, callback=print))(model, tokens)


@pytest.mark.slow  # each sample's key, by row and step, is that of the reference in test_buckets.py
def test_samples_depend_on_the_key_and_not_on_other_rows():
    model, tokens = make_model(), random_tokens((3, 6))
    draw = lambda tokens, seed: zoo.generate(model, tokens, max_new_tokens=9, temperature=1.5, key=jax.random.key(seed))
    first = draw(tokens, 1)
    assert jnp.array_equal(first, draw(tokens, 1))
    assert not jnp.array_equal(first, draw(tokens, 2))
    assert jnp.array_equal(first[1], draw(tokens.at[::2].set(0), 1)[1])
    same = draw(jnp.broadcast_to(tokens[:1], (3, 6)), 1)
    assert not jnp.array_equal(same[0], same[1])


@pytest.mark.slow  # test_buckets.py compares filtered samples with their reference, token for token
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.9, "min_p": 0.1}], ids=str
)
def test_samples_follow_their_distribution(options):
    """p(a, b) = p(a) p(b | a), by chi-square over 4,000 rows of one prompt."""
    vocab, rows, temperature = 5, 4000, 2.0
    model = zoo.models.Transformer(vocab=vocab, embed=16, layers=1, heads=2, mlp=16, key=KEY)
    prompt = jnp.array([[1, 4, 2]])
    pairs = jnp.concatenate([jnp.repeat(prompt, vocab, 0), jnp.arange(vocab)[:, None]], 1)
    logits = model(pairs)[:, 2:]
    cut = jax.vmap(lambda x: filter_logits(x / temperature, **options), 1, 1)(logits)
    first, then = np.float64(jax.nn.softmax(cut[0, 0])), np.float64(jax.nn.softmax(cut[:, 1]))
    expected = rows * (first[:, None] * then).ravel()
    tokens = zoo.generate(
        model, jnp.repeat(prompt, rows, 0), max_new_tokens=2, temperature=temperature, key=KEY, **options
    )
    counts = np.bincount(np.asarray(tokens @ jnp.array([vocab, 1])), minlength=vocab**2)
    possible = expected > 0
    assert not counts[~possible].any()
    assert possible.sum() > 3
    counts, expected = counts[possible], expected[possible]
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-3


@pytest.mark.ci
def test_repetition_penalty_spares_unseen_tokens():
    """The penalty is so strong that no token repeats; padding does not count as part of the prompt."""
    model, tokens = make_model(), random_tokens((2, 6))
    mask = left_padding_mask((2, 6), (4, 0))
    got = zoo.generate(model, tokens, max_new_tokens=20, mask=mask, repetition_penalty=1e6)
    for row, prompt, is_real in zip(got.tolist(), tokens.tolist(), mask.tolist(), strict=True):
        assert len(set(row)) == 20
        assert not set(row) & {token for token, real in zip(prompt, is_real, strict=True) if real}
    unpenalized = zoo.generate(model, tokens, max_new_tokens=20, mask=mask)
    assert jnp.array_equal(zoo.generate(model, tokens, max_new_tokens=20, mask=mask, repetition_penalty=1), unpenalized)


@pytest.mark.ci
def test_rows_end_with_stop_tokens_also_for_a_callback():
    model, tokens = make_model(**KINDS["windows, shared keys, capped"]), random_tokens((3, 6))
    unstopped = np.asarray(zoo.generate(model, tokens, max_new_tokens=24))
    stops = {int(unstopped[0, 4]), int(unstopped[1, 9])}
    expected = unstopped.copy()
    for row in expected:
        ends = [i for i, token in enumerate(row) if token in stops]
        if ends:
            row[ends[0] + 1 :] = -1
    assert (expected == -1).any()
    arguments = {"max_new_tokens": 24, "stop_tokens": sorted(stops)}
    assert (np.asarray(zoo.generate(model, tokens, **arguments)) == expected).all()
    received = []
    assert (np.asarray(zoo.generate(model, tokens, callback=received.append, **arguments)) == expected).all()
    assert all(isinstance(x, np.ndarray) and x.shape == (3,) for x in received)
    assert (np.stack(received, 1) == expected[:, : len(received)]).all()


def test_generate_ends_when_every_row_has():
    model, tokens = make_model(), random_tokens((3, 6))
    received = []
    every = range(SIZES["vocab"])
    got = zoo.generate(model, tokens, max_new_tokens=24, stop_tokens=every, callback=received.append)
    assert len(received) == 1 and (got[:, 1:] == -1).all() and (got[:, 0] >= 0).all()


def ban_repeats(logits, text):
    """No token follows itself, and 3 is never written."""
    last = jnp.take_along_axis(text.tokens, text.lengths[:, None] - 1, axis=1)
    return jnp.where(jnp.arange(logits.shape[1]) == last, -jnp.inf, logits).at[:, 3].set(-jnp.inf)


class Unhashable(partial):
    __hash__ = None


def choose_by_hand(model, row, count, options, vocab):
    """Greedy tokens of one row by their definition, from full forward passes."""
    text, new = list(row), []
    for _ in range(count):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(text)] = text
        logits = np.asarray(forward_logits(model, padded))[0, len(text) - 1].copy()
        counts = np.bincount(new, minlength=vocab)
        logits -= options.get("presence_penalty", 0) * (counts > 0) + options.get("frequency_penalty", 0) * counts
        if "logits" in options:
            logits[[text[-1], 3]] = -np.inf
        new.append(int(logits.argmax()))
        text.append(new[-1])
        if any(new[-len(stop) :] == list(stop) for stop in options.get("stop_sequences", ())):
            break
    return new + [-1] * (count - len(new))


@eqx.filter_jit
def forward_logits(model, tokens):
    return model(tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2.0, "frequency_penalty": 0.7},
        {"frequency_penalty": -1.0, "logits": ban_repeats},
        {"stop_sequences": True, "callback": True},
    ],
    ids=lambda options: ", ".join(options),
)
def test_rules_of_the_text_so_far_follow_their_definition(options):
    """Prompts of different lengths: tokens of the prompt are not counted, and end no row."""
    model, tokens, new = jax.tree.map(lambda x: 3 * x, make_model()), random_tokens((2, 6)), 14
    rows = [tokens[0].tolist(), tokens[1, 3:].tolist()]
    if "stop_sequences" in options:
        plain = [choose_by_hand(model, row, new, {}, SIZES["vocab"]) for row in rows]
        options = {"stop_sequences": (plain[0][4:7], rows[1][-1:] + plain[1][:1], (plain[1][9],))}
        options |= {"callback": lambda newest: None}
    expected = [choose_by_hand(model, row, new, options, SIZES["vocab"]) for row in rows]
    got = zoo.generate(model, tokens, mask=left_padding_mask((2, 6), (0, 3)), max_new_tokens=new, **options)
    np.testing.assert_array_equal(got, expected)


def test_details_are_the_probabilities_of_the_new_tokens():
    """Under softmax(logits), and under the distribution after temperature and top-k; 0 after a row's end."""
    model, tokens = jax.tree.map(lambda x: 3 * x, make_model()), random_tokens((3, 6))
    options = {"temperature": 0.7, "top_k": 5, "key": KEY, "max_new_tokens": 16, "stop_tokens": range(8)}
    found = zoo.generate(model, tokens, **options, details=True)
    np.testing.assert_array_equal(found.tokens, zoo.generate(model, tokens, **options))
    is_new = np.asarray(found.tokens) >= 0
    assert not is_new.all() and is_new[:, 0].all()
    text = jnp.concatenate([tokens, jnp.maximum(found.tokens, 0)], axis=1)
    logits = model(text)[:, 5:-1]
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-6 * float(jnp.abs(logits).max()))
    close(found.log_probs, np.where(is_new, zoo.score(model, text)[:, 5:], 0))
    logits = logits / 0.7
    cut = jnp.where(logits >= jax.lax.top_k(logits, 5)[0][..., -1:], logits, -jnp.inf)
    scores = jnp.take_along_axis(jax.nn.log_softmax(cut), jnp.maximum(found.tokens, 0)[..., None], axis=-1)[..., 0]
    close(found.sampling_log_probs, np.where(is_new, scores, 0))
    assert found.steps == is_new.sum(1).max()
    streamed = zoo.generate(model, tokens, **options, details=True, callback=lambda newest: None)
    for x, y in zip(streamed[:3], found[:3], strict=True):
        close(x, y)


@pytest.mark.parametrize("callback", [None, lambda newest: None], ids=["one program", "callback"])
def test_samples_are_those_of_repeated_prompts(callback):
    model, tokens, mask = make_model(), random_tokens((3, 6)), left_padding_mask((3, 6), (0, 4, 2))
    draw = partial(zoo.generate, model, max_new_tokens=9, temperature=1.5, key=KEY, callback=callback)
    got = draw(tokens, mask=mask, samples=4)
    np.testing.assert_array_equal(got, draw(jnp.repeat(tokens, 4, 0), mask=jnp.repeat(mask, 4, 0)))
    assert len({tuple(row) for row in got.tolist()}) == 12
    switching = make_length_dependent_model(LONGROPE)
    greedy = partial(zoo.generate, switching, tokens, max_new_tokens=9, callback=callback)
    np.testing.assert_array_equal(greedy(samples=2), jnp.repeat(greedy(), 2, axis=0))


def test_a_callback_may_end_rows():
    model, tokens = make_model(), random_tokens((3, 6))
    expected = np.asarray(zoo.generate(model, tokens, max_new_tokens=9)).copy()
    received = []

    def end(newest):
        received.append(newest)
        return np.array([len(received) >= 3, len(received) == 5, False])

    expected[0, 3:] = expected[1, 5:] = -1
    np.testing.assert_array_equal(zoo.generate(model, tokens, max_new_tokens=9, callback=end), expected)
    received.clear()
    every = lambda newest: received.append(newest) or np.ones(3, bool)
    assert (zoo.generate(model, tokens, max_new_tokens=9, callback=every)[:, 1:] == -1).all() and len(received) == 1
    with pytest.raises(TypeError, match="booleans for its 3 rows, not bool"):
        zoo.generate(model, tokens, max_new_tokens=9, callback=lambda newest: np.array(True))


@pytest.mark.slow  # test_mesh.py::test_mesh_shards_caches_and_updates_them_in_place holds it by default
def test_decode_step_updates_caches_in_place():
    """Donated caches are aliased to the outputs, and temporaries are smaller than they are."""
    from zoo.generate.decode import begin, decode_until, unstack_layers
    from zoo.generate.request import DecodeOptions, Sampling
    from zoo.parallel.spmd import _JITTED, run_jitted

    model, options = (
        make_model(head_dim=32),
        DecodeOptions.of(Sampling(), SIZES["vocab"]),
    )
    prompt = pad_prompt(jnp.zeros((4, 16), jnp.int32), None, 4, 2048)
    state = run_jitted(begin, (model, options, KEY), (prompt, 2048))
    state_size = sum(x.nbytes for x in jax.tree.leaves(state))
    fixed = unstack_layers(model, None), options
    program = _JITTED[True].lower((decode_until, fixed), (state, jnp.int32(9)), None).compile()
    memory = program.compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state_size
    assert memory.temp_size_in_bytes < state_size / 2
    cache = dataclasses.replace(state.states[0])
    run_jitted(decode_until, fixed, (state, jnp.int32(9)), donate=True)
    assert cache.key.is_deleted()


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [DynamicScaling(2.0, 8), LongRopeScaling((1.0, 1.5), (2.0, 4.0), 8, 4.0)])
def test_length_is_that_of_length_dependent_rope(scaling):
    """An uncached row of 11 tokens, its end not yet generated, has the angles for 11: attention is causal."""
    model, prompt, new = make_model(rotary=Rotary(4, scaling=scaling)), random_tokens((1, 6)), 5
    row = np.zeros((1, 6 + new), np.int32)
    row[:, :6] = prompt
    for i in range(6, 6 + new):
        row[:, i] = forward_greedy(model, row, row >= 0)[:, i - 1]
    for options in ({}, {"callback": lambda _: None}):
        got = zoo.generate(model, prompt, max_new_tokens=new, length=6 + new, **options)
        np.testing.assert_array_equal(got, row[:, 6:])


LONGROPE = LongRopeScaling((1.0, 1.5), (4.0, 9.0), original_length=12, factor=4.0)


def make_length_dependent_model(scaling):
    """Attention that matters: matrices times 3."""
    model = make_model(rotary=Rotary(4, 1e4, scaling=scaling), tied=False)
    return jax.tree.map(lambda x: 3 * x if x.ndim == 3 else x, model)


def test_longrope_switches_with_the_longest_row():
    """Each token is the most likely one of a forward pass over the tokens before it, whatever number is allowed: with
    prompts below, at and above the original length, and rows of different lengths."""
    model, new = make_length_dependent_model(LONGROPE), 10
    for seq, pads in ((7, (3, 0)), (12, (0, 11)), (14, (0, 3))):
        tokens, mask = random_tokens((2, seq), seed=seq), left_padding_mask((2, seq), pads)
        text, is_real = np.zeros((2, 24), np.int32), np.zeros((2, 24), bool)
        text[:, :seq], is_real[:, :seq] = tokens, mask
        for i in range(seq, seq + new):
            text[:, i] = forward_greedy(model, text, is_real)[:, i - 1]
            is_real[:, i] = True
        for count in (1, 6, new):
            got = zoo.generate(model, tokens, max_new_tokens=count, mask=mask)
            np.testing.assert_array_equal(got, text[:, seq : seq + count])
    received = []
    options = {"mask": left_padding_mask((2, 7), (3, 0)), "max_new_tokens": new}
    got = zoo.generate(model, random_tokens((2, 7), seed=7), callback=received.append, **options)
    np.testing.assert_array_equal(got, zoo.generate(model, random_tokens((2, 7), seed=7), **options))
    np.testing.assert_array_equal(np.stack(received, 1), got)


@pytest.mark.ci
def test_longrope_switches_on_a_mesh_and_for_ended_rows():
    model, mask = make_length_dependent_model(LONGROPE), left_padding_mask((3, 7), (3, 0, 5))
    tokens, options = random_tokens((3, 7)), {"mask": mask, "max_new_tokens": 14}
    unstopped = np.asarray(zoo.generate(model, tokens, **options))
    options["stop_tokens"] = [int(unstopped[1, 3])]  # before the switch, in the longest row
    expected = np.asarray(zoo.generate(model, tokens, **options))
    assert (expected[1, 4:] == -1).all() and (expected >= 0).any(axis=0).all()
    kept = expected >= 0
    np.testing.assert_array_equal(expected[kept], unstopped[kept])
    mesh = zoo.make_mesh(data=2, context=2, tensor=2)
    np.testing.assert_array_equal(zoo.generate(zoo.place(model, mesh), tokens, mesh=mesh, **options), expected)
    under_jit = eqx.filter_jit(partial(zoo.generate, **options | {"mask": None}))
    np.testing.assert_array_equal(under_jit(model, tokens), zoo.generate(model, tokens, **options | {"mask": None}))


def test_dynamic_rope_rotates_each_token_for_the_length_so_far():
    """As transformers does: the prompt for its length, each new token for the length with it, and cached keys stay."""
    model, seq, new = make_length_dependent_model(DynamicScaling(8.0, original_length=10)), 7, 12
    read = eqx.filter_jit(lambda model, tokens, positions, states: model.hidden(tokens, TokenInfo(positions), states))
    for start in (seq, 13):
        prompt = random_tokens((1, start), seed=2)
        text, states = list(np.asarray(prompt)[0]), model.init_state(1, 64)
        for i in range(start + new - 1):
            states = set_rope_length(states, max(i + 1, start))
            hidden, states = read(model, jnp.array([[text[i]]]), jnp.array([[i]]), states)
            if i >= start - 1:
                text.append(int(model.logits(hidden.x)[0, 0].argmax()))
        for count in (2, new):
            got = zoo.generate(model, prompt, max_new_tokens=count)
            assert got[0].tolist() == text[start : start + count]


def test_padded_prompts_have_positions_of_each_row_alone():
    """RoPE depends on distances only, and would not notice positions that count the padding."""
    learned = PositionEmbedding(24, SIZES["embed"], key=KEY)
    model, tokens = dataclasses.replace(make_model(), position_embedding=learned), random_tokens((2, 9))
    got = zoo.generate(model, tokens, max_new_tokens=8, mask=left_padding_mask((2, 9), (6, 2)))
    for row, pad in enumerate((6, 2)):
        alone = jnp.stack([tokens[row, pad:], tokens[row, pad:]])
        assert jnp.array_equal(got[row], zoo.generate(model, alone, max_new_tokens=8)[0])


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "key": jax.random.key(2)}], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_are_an_error(options):
    """The embedding of one token is NaN: a row that reads it ends, and other rows go on."""
    model = make_model(tied=False)
    one = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight.at[5].set(jnp.nan))
    tokens = jnp.array([[1, 2, 3], [1, 5, 3]])
    options |= {"max_new_tokens": 4}
    with pytest.raises(ValueError, match="logits of row 1 are not finite after 0 new tokens"):
        zoo.generate(one, tokens, **options)
    received = []
    with pytest.raises(ValueError, match="logits of row 1 are not finite"):
        zoo.generate(one, tokens, callback=received.append, **options)
    assert received[0][0] >= 0 and received[0][1] == -1
    new = eqx.filter_jit(partial(zoo.generate, **options))(one, tokens)
    assert (new[1] == -1).all() and jnp.array_equal(new[:1], zoo.generate(model, tokens, **options)[:1])
    assert (new[0] != 5).all()  # it would read NaN, too


def test_cache_length_is_at_most_the_learned_positions():
    """A capacity of 20 tokens must not be rounded up: the model has 20 learned positions."""
    learned = PositionEmbedding(20, SIZES["embed"], key=KEY)
    model, tokens = dataclasses.replace(make_model(), position_embedding=learned), random_tokens((1, 6))
    assert (zoo.generate(model, tokens, max_new_tokens=14) >= 0).all()
    for options in ({"max_new_tokens": 15}, {"max_new_tokens": 3, "length": 32}):
        with pytest.raises(ValueError, match=r"(21|32) tokens are too many: the model learned 20 positions"):
            zoo.generate(model, tokens, **options)


NO_TOKEN = jnp.zeros((2, 6), bool)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": jnp.zeros((2, 0), int)}, r"a prompt of at least 1 row and 1 token.*\(2, 0\)"),
        ({"tokens": jnp.zeros((0, 2), int)}, r"at least 1 row"),
        ({"mask": NO_TOKEN.at[1].set(True)}, "row 0 of the prompt has no real token"),
        ({"mask": ~NO_TOKEN.at[1, 3].set(True)}, "mask: row 1 has padding between its real tokens"),
        ({"mask": ~NO_TOKEN.at[1, 5].set(True)}, "padded on the left.*row 1 of mask"),
        ({"tokens": jnp.full((2, 6), 32)}, "the prompt holds 32, which is outside the vocabulary of 32 tokens"),
        ({"tokens": jnp.full((2, 6), -1)}, "the prompt holds -1"),
        ({"max_new_tokens": 0}, "max_new_tokens of at least 1, not 0"),
        ({"temperature": -1.0, "key": KEY}, "temperature=-1.0 needs to be 0, or above 0"),
        ({"temperature": float("nan"), "key": KEY}, "temperature=nan"),
        ({"temperature": 1}, "temperature=1 needs to be 0, or above 0 with a key"),
        ({"top_p": 0.5, "key": KEY}, "top_p needs sampling, and temperature=0 is greedy"),
        ({"temperature": 1, "key": KEY, "top_k": 0}, "top_k keeps at least 1 token, not 0"),
        ({"temperature": 1, "key": KEY, "top_p": 0.0}, "top_p is above 0 and at most 1, not 0.0"),
        ({"temperature": 1, "key": KEY, "min_p": 1.5}, "min_p is at least 0 and at most 1, not 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is above 0.*not 0"),
        ({"stop_tokens": (3, 32)}, "stop_tokens: 32 is outside the vocabulary of 32 tokens"),
        ({"presence_penalty": float("inf")}, "presence_penalty is a finite number, 0 changing nothing, not inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is a finite number"),
        ({"stop_sequences": ((3, 32),)}, "stop_sequences: 32 is outside the vocabulary of 32 tokens"),
        ({"stop_sequences": ((3,), ())}, "stop_sequences holds an empty sequence"),
        ({"samples": 0}, "samples of at least 1, not 0"),
        ({"length": 8}, "length=8 does not hold 6 tokens of the prompt and 3 new ones: 9"),
    ],
    ids=str,
)
def test_generate_raises_on_bad_arguments(options, message):
    tokens = options.pop("tokens", random_tokens((2, 6)))
    with pytest.raises(ValueError, match=message):
        zoo.generate(make_model(), tokens, **{"max_new_tokens": 3} | options)


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 2.5}, {"max_new_tokens": True}, {"top_k": 2.0}, {"samples": 2.0}], ids=str
)
def test_generate_raises_on_numbers_that_are_no_integers(no_type_checks, options):
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=f"{name}={value}: expected a whole number|{name} is an integer, not {value}$"):
        zoo.generate(make_model(), random_tokens((2, 6)), **{"max_new_tokens": 3} | options)


@pytest.mark.parametrize("stop_tokens", [7, (2.5,), "7", None], ids=repr)
def test_generate_raises_on_stop_tokens_that_are_no_integers(no_type_checks, stop_tokens):
    with pytest.raises(TypeError, match=r"stop_tokens is a sequence of token ids, such as \(7,\), not "):
        zoo.generate(make_model(), random_tokens((2, 6)), max_new_tokens=3, stop_tokens=stop_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stop_sequences": (3, 4)},
            r"stop_sequences is a sequence of sequences of token ids, such as \(\(13, 13\),\)",
        ),
        ({"logits": 3}, "logits is a function of logits and the text so far, not 3"),
        ({"logits": Unhashable(ban_repeats)}, "logits: Unhashable cannot be hashed"),
    ],
    ids=["sequences", "number", "unhashable"],
)
def test_generate_raises_on_rules_of_other_types(no_type_checks, options, message):
    with pytest.raises(TypeError, match=message):
        zoo.generate(make_model(), random_tokens((2, 6)), max_new_tokens=3, **options)


def test_padding_tokens_may_be_any_id():
    model, tokens, mask = make_model(), random_tokens((2, 6)), left_padding_mask((2, 6), (3, 0))
    new = [
        zoo.generate(model, jnp.where(mask, tokens, pad), max_new_tokens=5, mask=mask) for pad in (-100, 0, 31, 32000)
    ]
    assert all(jnp.array_equal(x, new[0]) for x in new)


def test_generate_takes_decoders_only(no_type_checks):
    model = zoo.models.VisionTransformer(
        classes=2, embed=8, layers=1, heads=2, mlp=8, image_size=8, patch_size=4, channels=1, key=KEY
    )
    with pytest.raises(TypeError, match="text is generated by a Decoder, not by ImageEncoder"):
        zoo.generate(model, random_tokens((1, 2)), max_new_tokens=1)
