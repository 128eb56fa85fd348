"""Few programs serve calls of any shape and options, and buckets change no token."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.generate.buckets import choose_cache_length, choose_piece, choose_rows, count_pieces_at_once
from zoo.ops.rotary import DynamicScaling, Rotary

KEY = jax.random.key(0)
VOCAB, WIDTH, ROWS, NEW = 64, 160, 8, 60
MODELS = {
    "transformer": functools.partial(
        zoo.models.Transformer,
        vocab=VOCAB,
        embed=16,
        layers=1,
        heads=2,
        kv_heads=1,
        mlp=24,
        windows=(40,),
        soft_cap=5.0,
        tied=False,
    ),
    "mamba": functools.partial(zoo.models.Mamba, vocab=VOCAB, embed=16, layers=1),
}


@contextlib.contextmanager
def count_compilations():
    """Yield a list that grows with every program compiled or fetched from the compilation cache."""
    found = []

    def listen(event, duration, **_):
        found.extend([event] * (event == "/jax/core/compile/backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def make_mixed_calls(count, max_new):
    """Prompts of 1 to 100 tokens in 1 to 8 rows, some padded, up to `max_new` new tokens, and any options."""
    rng = np.random.default_rng(0)
    keys = [jax.random.key(i) for i in range(count)]
    for key in keys:
        rows, seq = rng.integers(1, ROWS + 1), rng.integers(1, 101)
        options = {"max_new_tokens": int(rng.integers(1, max_new + 1))}
        if rng.random() < 0.6:
            options |= {"temperature": float(rng.uniform(0.2, 2)), "key": key}
            ranges = {"top_k": (1, VOCAB), "top_p": (0.1, 1.0), "min_p": (0.0, 0.3)}
            options |= {name: type(r[1])(rng.uniform(*r)) for name, r in ranges.items() if rng.random() < 0.5}
        if rng.random() < 0.3:
            options["repetition_penalty"] = float(rng.uniform(0.8, 2))
        if rng.random() < 0.4:
            options["stop_tokens"] = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        if rng.random() < 0.5:
            options["mask"] = jnp.asarray(np.arange(seq) >= rng.integers(0, seq, rows)[:, None])
        yield jnp.asarray(rng.integers(0, VOCAB, (rows, seq)), jnp.int32), options


def filter_reference(logits, top_k=VOCAB, top_p=1.0, min_p=0.0):
    """Set excluded logits of each row to -inf, by the papers' rules."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, -1)
    ranked = np.where(ranked >= ranked[:, top_k - 1 : top_k], ranked, -np.inf)
    probability = np.exp(ranked - ranked[:, :1])
    before = np.cumsum(probability, -1) - probability
    probability[before >= top_p * probability.sum(-1, keepdims=True)] = 0
    probability[probability < min_p] = 0
    kept = np.take_along_axis(probability > 0, np.argsort(order, axis=-1), -1)
    return np.where(kept, logits, -np.inf)


@jax.jit
def draw_reference(logits, key, steps):
    """The sampled tokens, "rows steps": row r draws step s with the key folded with r, then with s."""
    draw = lambda logits, row, step: jax.random.categorical(
        jax.random.fold_in(jax.random.fold_in(key, row), step), logits
    )
    return jax.vmap(jax.vmap(draw, (0, None, 0)), (0, 0, None))(logits, jnp.arange(len(logits)), steps)


@eqx.filter_jit
def forward(model, tokens, mask):
    return model(tokens, mask=mask)


def check_against_full_forward(model, tokens, new, options):
    """By induction one uncached forward pass over prompt and result shows that each token follows from those before."""
    (rows, seq), count = tokens.shape, options["max_new_tokens"]
    assert new.shape == (rows, count) and new.dtype == np.int32
    mask = np.asarray(options.get("mask", np.ones((rows, seq), bool)))
    text, is_real = np.zeros((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH), bool)
    text[:rows, :seq], text[:rows, seq : seq + count] = tokens, np.maximum(new, 0)
    is_real[:rows, :seq], is_real[:, seq:], is_real[rows:] = mask, True, True
    logits = np.asarray(forward(model, text, is_real), np.float64)[:rows, seq - 1 : seq - 1 + count]
    seen = np.zeros((rows, count, VOCAB), bool)
    for row in range(rows):
        for step in range(count):
            seen[row, step, np.r_[np.asarray(tokens)[row][mask[row]], new[row, :step]]] = True
    penalty = options.get("repetition_penalty", 1.0)
    logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    expected = logits.argmax(-1)
    if temperature := options.get("temperature"):
        filters = {name: options[name] for name in ("top_k", "top_p", "min_p") if name in options}
        cut = filter_reference((logits / temperature).reshape(-1, VOCAB), **filters).reshape(logits.shape)
        padded = np.zeros((ROWS, NEW, VOCAB), np.float32)
        padded[:rows, :count] = cut
        expected = np.asarray(draw_reference(padded, options["key"], np.arange(NEW)))[:rows, :count]
    is_stop = np.isin(expected, options.get("stop_tokens", ()))
    has_ended = np.cumsum(is_stop, 1) - is_stop > 0
    np.testing.assert_array_equal(new, np.where(has_ended, -1, expected))


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind, count, max_new",
    [("transformer", 30, 28), *(pytest.param(kind, 60, NEW, marks=pytest.mark.slow) for kind in MODELS)],
)
def test_mixed_calls_compile_few_programs_and_are_exact(kind, count, max_new):
    """Rows end, options come and go, and new weights of the same structure compile nothing."""
    model, other = (eqx.filter_jit(lambda key: MODELS[kind](key=key))(key) for key in jax.random.split(KEY))
    calls = list(make_mixed_calls(count, max_new))
    with count_compilations() as compiled:
        results = [np.asarray(zoo.generate(model, tokens, **options)) for tokens, options in calls]
    assert 1 <= len(compiled) <= 9  # a program per number of rows and cache length, and those that make a key
    with count_compilations() as compiled:
        zoo.generate(other, calls[0][0], **calls[0][1])
    assert not compiled
    assert sum((new == -1).any() for new in results) > 5
    for (tokens, options), new in zip(calls, results, strict=True):
        check_against_full_forward(model, tokens, new, options)


@pytest.mark.slow  # weights/test_parity.py decodes with a recurrence
def test_prompts_in_pieces_are_exact_for_a_recurrent_model():
    """The first pieces of a row may be padding only, which must leave its state as it is."""
    model, tokens = MODELS["mamba"](key=KEY), jax.random.randint(KEY, (3, 90), 0, VOCAB)
    for seq, pads in ((90, (0, 70, 89)), (40, (33, 0, 1)), (1, (0, 0, 0))):
        mask = jnp.asarray(np.arange(seq) >= np.array(pads)[:, None])
        options = {"max_new_tokens": 20, "mask": mask}
        new = np.asarray(zoo.generate(model, tokens[:, :seq], **options))
        check_against_full_forward(model, tokens[:, :seq], new, options)


def test_callback_adds_two_programs_per_bucket():
    model = zoo.models.Transformer(vocab=32, embed=8, layers=1, heads=1, mlp=8, key=KEY)
    draw = lambda seq, new, **options: zoo.generate(
        model, jax.device_put(np.ones((2, seq), np.int32)), max_new_tokens=new, callback=lambda _: None, **options
    )
    draw(3, 2)
    with count_compilations() as compiled:
        draw(11, 4, temperature=0.7, key=KEY)
        draw(70, 1, stop_tokens=[3], repetition_penalty=1.1)
    assert not compiled


def test_cache_length_is_rounded_within_what_the_model_supports():
    make = lambda **options: zoo.models.Transformer(
        vocab=8, embed=8, layers=1, heads=1, mlp=8, key=KEY, rotary=Rotary(4, **options)
    )
    lengths = [choose_cache_length(make(), 6, new, None) for new in (1, 122, 123, 186, 187, 251)]
    assert lengths == [128, 128, 192, 192, 256, 384]
    dynamic = make(scaling=DynamicScaling(2.0, original_length=20))
    assert [choose_cache_length(dynamic, 6, new, None) for new in (3, 14, 123)] == [128, 128, 192]


def test_rows_are_rounded_unless_the_model_has_arrays_per_row():
    model = zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=1, mlp=8, key=KEY)
    choose = functools.partial(choose_rows, model)
    assert [choose(rows, None) for rows in (1, 2, 4, 5, 9, 13, 17, 25)] == [1, 4, 4, 8, 12, 16, 24, 32]
    mesh = zoo.make_mesh(data=4, tensor=2)
    assert [choose(rows, mesh) for rows in (1, 4, 5, 33)] == [4, 4, 16, 48]
    assert all(size <= choose(size, None) <= 1.5 * size for size in range(9, 200))
    adapted = zoo.adapters.lora(model, targets="query", adapter_name="only", key=KEY)
    per_row = zoo.adapters.select_per_row(adapted, ["only", None])
    assert choose_rows(per_row, 2, None) == 2
    with pytest.raises(ValueError, match="samples=2: the model has an adapter for each row .*: repeat the prompts"):
        zoo.generate(per_row, np.ones((2, 3), int), max_new_tokens=1, samples=2)
    with pytest.raises(ValueError, match="rows=2 gives a row to one request after another: .*set_strength"):
        zoo.generate_stream(per_row, [], rows=2, length=8)
    assert [choose_piece(length) for length in (21, 128, 192, 4096)] == [6, 32, 48, 256]
    assert [count_pieces_at_once(rows, 256) for rows in (1, 8, 16, 48, 64, 512)] == [8, 8, 4, 1, 1, 1]
    context = zoo.make_mesh(context=8)
    assert [choose_piece(length, context) for length in (21, 128, 4096)] == [8, 32, 256]
