"""Every public entrance, called with every kind of tokens, masks, segment ids, positions and keys: the result is that
of each row alone, or the input is refused by name."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers.token_info import count_positions, token_info
from zoo.models.stack import swap_stack

VOCAB, SEQ, LENGTHS = 40, 8, (8, 5, 3)
SIZES: dict[str, Any] = {"vocab": VOCAB, "embed": 16, "layers": 2}
MODELS: dict[str, Callable[..., Any]] = {
    "attention": partial(zoo.models.Transformer, **SIZES, heads=2, mlp=16, dropout=0.5),
    "recurrence": partial(zoo.models.Mamba, **SIZES, dropout=0.5),
}
TOKENS: Any = np.random.default_rng(0).integers(1, VOCAB, (3, SEQ)).astype(np.int32)
MASK: Any = np.arange(SEQ) >= SEQ - np.array(LENGTHS)[:, None]
SEGMENTS = np.array([[1] * 8, [1] * 3 + [2] * 5, [0] * 3 + [3] * 2 + [4] * 3], np.int32)
POSITIONS: Any = np.where(MASK, MASK.cumsum(1) - 1, -1).astype(np.int32)
MESH = zoo.make_mesh(devices=jax.devices()[:1])
KEY = jax.random.key(1)


@cache
def make_model(name: str) -> Any:
    """Make a model without scans: calls outside of programs compile operations, which they share."""
    model = eqx.filter_jit(MODELS[name])(key=jax.random.key(0))
    return swap_stack(model, zoo.models.Stack.unstack)


@cache
def make_stacked() -> Any:
    return eqx.filter_jit(zoo.models.Transformer)(**SIZES, heads=2, mlp=16, key=jax.random.key(0))


def compute_loss(model: Any, tokens: Any, **given: Any) -> Any:
    total, count = zoo.cross_entropy(model, {"tokens": tokens, "targets": tokens} | given)
    return total / count


def compute_placed_loss(model: Any, tokens: Any, **given: Any) -> Any:
    batch = zoo.place_batch({"tokens": tokens, "targets": tokens} | given, MESH)
    return evaluate(model, batch)


evaluate = zoo.value(zoo.cross_entropy, MESH)


@dataclasses.dataclass(frozen=True)
class Entrance:
    call: Callable[..., Any]
    takes: tuple[str, ...]


ENTRANCES = {
    "model": Entrance(lambda model, tokens, **given: model(tokens, **given), ("mask", "segment_ids", "positions")),
    "hidden_states": Entrance(
        lambda model, tokens, **given: zoo.hidden_states(model, tokens, **given)[-1],
        ("mask", "segment_ids", "positions"),
    ),
    "score": Entrance(zoo.score, ("mask", "segment_ids", "positions")),
    "embed": Entrance(lambda model, tokens, **given: zoo.embed(model, tokens, **given, pooling="mean"), ("mask",)),
    "generate": Entrance(
        lambda model, tokens, **given: zoo.generate(model, tokens, **given, max_new_tokens=2), ("mask",)
    ),
    "cross_entropy": Entrance(compute_loss, ("segment_ids", "positions")),
    "place_batch": Entrance(compute_placed_loss, ("segment_ids", "positions")),
    "value": Entrance(
        lambda model, tokens, **given: evaluate(model, {"tokens": tokens, "targets": tokens} | given),
        ("segment_ids", "positions"),
    ),
}
GIVEN: dict[str, Any] = {
    "tokens": {},
    "mask": {"mask": MASK},
    "segment_ids": {"segment_ids": SEGMENTS},
    "positions": {"positions": POSITIONS},
}


@cache
def expect(entrance: str, model: str, argument: str) -> np.ndarray:
    """Return the result with the argument as JAX's booleans or int32."""
    given = {name: jnp.asarray(x) for name, x in GIVEN[argument].items()}
    return np.asarray(ENTRANCES[entrance].call(make_model(model), jnp.asarray(TOKENS), **given))


def compare(entrance: str, model: str, argument: str, tokens: Any, given: dict) -> None:
    result = ENTRANCES[entrance].call(make_model(model), tokens, **given)
    np.testing.assert_allclose(np.asarray(result), expect(entrance, model, argument), atol=1e-5, rtol=1e-5)


DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
KINDS = {
    "one of each": ("numpy int64", "numpy uint8", "jax int8"),
    "all": (*(f"numpy {dtype}" for dtype in DTYPES), *(f"jax {dtype}" for dtype in DTYPES[:-2])),
}


def convert(x: np.ndarray, kind: str) -> Any:
    library, dtype = kind.split()
    return x.astype(dtype) if library == "numpy" else jnp.asarray(x.astype(dtype))


FEWER_BY_DEFAULT = ["attention", pytest.param("recurrence", marks=pytest.mark.slow)]
ARGUMENTS = [(name, argument) for name, entrance in ENTRANCES.items() for argument in ("tokens", *entrance.takes)]


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("model", FEWER_BY_DEFAULT)
@pytest.mark.parametrize("entrance, argument", ARGUMENTS)
@pytest.mark.parametrize("kinds", ["one of each", pytest.param("all", marks=pytest.mark.slow)])
def test_integers_of_any_dtype_are_taken(no_type_checks, entrance, argument, model, kinds):
    for kind in KINDS[kinds]:
        if argument == "positions" and kind.split()[1].startswith("uint"):
            continue  # they hold no -1
        tokens = convert(TOKENS, kind) if argument == "tokens" else TOKENS
        given = {name: convert(x, kind) for name, x in GIVEN[argument].items()}
        compare(entrance, model, argument, tokens, given)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("entrance", [name for name, entrance in ENTRANCES.items() if "mask" in entrance.takes])
def test_boolean_masks_of_numpy_and_jax_are_taken(entrance, model):
    compare(entrance, model, "mask", TOKENS, {"mask": MASK})
    compare(entrance, model, "mask", jnp.asarray(TOKENS), {"mask": MASK})


@pytest.mark.parametrize("model", MODELS)
def test_result_is_that_of_each_text_alone(model):
    alone = lambda text: np.asarray(make_model(model)(text[None]))[0]
    expected = [alone(TOKENS[row, SEQ - length :]) for row, length in enumerate(LENGTHS)]
    for given in (GIVEN["mask"], GIVEN["positions"]):
        logits = np.asarray(make_model(model)(TOKENS, **given))
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(logits[row, SEQ - length :], expected[row], atol=1e-5)
    packed = np.asarray(make_model(model)(TOKENS, segment_ids=SEGMENTS))
    for row, first, end in ((0, 0, 8), (1, 0, 3), (1, 3, 8), (2, 3, 5), (2, 5, 8)):
        np.testing.assert_allclose(packed[row, first:end], alone(TOKENS[row, first:end]), atol=1e-5)


def with_value(x: np.ndarray, value: int) -> np.ndarray:
    changed = x.copy()
    changed[1, 4] = value
    return changed


HOLE, REPEATED = MASK.copy(), SEGMENTS.copy()
HOLE[0, 3], REPEATED[1, 6:] = False, 1
REFUSED = {
    "tokens": {
        "a list": (TOKENS.tolist(), TypeError, "got list"),
        "floats": (TOKENS.astype(np.float32), TypeError, "expected integers, got float32"),
        "booleans": (MASK, TypeError, "expected integers, got bool"),
        "one row": (TOKENS[0], ValueError, r"of shape \(8,\)"),
        "beyond int32": (TOKENS.astype(np.int64) + 2**32, ValueError, "outside the vocabulary|fit into 32 bits"),
    },
    "mask": {
        "a list": (MASK.tolist(), TypeError, "mask: expected an array, got list"),
        "floats": (
            MASK.astype(np.float32),
            TypeError,
            "mask: expected booleans, True for real tokens, got float32",
        ),
        "twos": (2 * MASK.astype(np.int32), ValueError, "mask: expected booleans, or 0 and 1, got 2"),
        "segment ids": (SEGMENTS, ValueError, "segment ids of packed rows are not a mask"),
        "a hole": (HOLE, ValueError, "mask: row 0 has padding between its real tokens"),
        "one row": (MASK[:1], ValueError, r"mask: expected the shape of tokens, \(3, 8\), got \(1, 8\)"),
    },
    "segment_ids": {
        "a list": (SEGMENTS.tolist(), (TypeError, ValueError), "segment_ids|an array"),
        "floats": (SEGMENTS.astype(np.float32), TypeError, "segment_ids: expected integers, got float32"),
        "booleans": (MASK, TypeError, "segment_ids: expected integers, got bool"),
        "negative": (with_value(SEGMENTS, -1), ValueError, "segment_ids: documents count from 1"),
        "repeated": (REPEATED, ValueError, "segment_ids: in row 1 1 comes again"),
        "beyond int32": (SEGMENTS.astype(np.int64) + 2**32, ValueError, "fit into 32 bits"),
        "short": (SEGMENTS[:, 1:], ValueError, r"\(3, 7\)"),
    },
    "positions": {
        "floats": (POSITIONS.astype(np.float32), TypeError, "positions: expected integers, got float32"),
        "one row": (POSITIONS[:1], ValueError, "positions: expected the shape|one number of rows, .*positions': 1"),
        "beyond int32": (POSITIONS.astype(np.int64) + 2**32, ValueError, "positions: .* fit into 32 bits"),
    },
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("entrance, argument", ARGUMENTS)
def test_other_inputs_are_refused_by_name(no_type_checks, entrance, argument, model):
    for label, (x, error, message) in REFUSED[argument].items():
        tokens, given = (x, {}) if argument == "tokens" else (TOKENS, {argument: x})
        with pytest.raises(error, match=message) as raised:
            ENTRANCES[entrance].call(make_model(model), tokens, **given)
        assert "\n" not in str(raised.value), label


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("model", FEWER_BY_DEFAULT)
@pytest.mark.parametrize("entrance, argument", [pair for pair in ARGUMENTS if pair[0] not in ("place_batch", "value")])
def test_programs_compute_the_same(entrance, argument, model):
    call = ENTRANCES[entrance].call
    run = eqx.filter_jit(lambda model, tokens, given: call(model, tokens, **given))
    given = {name: jnp.asarray(x) for name, x in GIVEN[argument].items()}
    result = run(make_model(model), jnp.asarray(TOKENS), given)
    np.testing.assert_allclose(np.asarray(result), expect(entrance, model, argument), atol=1e-5, rtol=1e-5)
    if argument == "mask":
        with pytest.raises(TypeError, match="mask: inside a program expected booleans, got int32: take mask > 0"):
            run(make_model(model), jnp.asarray(TOKENS), {"mask": jnp.asarray(MASK, jnp.int32)})
    if argument == "segment_ids":  # a document whose id comes again is another one
        result = run(make_model(model), jnp.asarray(TOKENS), {"segment_ids": jnp.asarray(REPEATED)})
        expected = call(make_model(model), TOKENS, segment_ids=np.where(SEGMENTS != REPEATED, 5, SEGMENTS))
        np.testing.assert_allclose(np.asarray(result), np.asarray(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("model", MODELS)
def test_states_take_positions_only(no_type_checks, model):
    model = make_model(model)
    states = model.init_state(3, 16)
    expected = model(TOKENS, mask=MASK)[MASK]
    for positions in (POSITIONS, jnp.asarray(POSITIONS), POSITIONS.astype(np.int8), count_positions(MASK)):
        info = token_info(TOKENS, positions=positions)
        hidden, after = model.hidden(jnp.asarray(TOKENS), info, states)
        np.testing.assert_allclose(model.logits(hidden.x)[MASK], expected, atol=1e-5)
    for given in (GIVEN["mask"], GIVEN["segment_ids"], GIVEN["segment_ids"] | GIVEN["positions"]):
        with pytest.raises(ValueError, match="a call with states continues one document in each row"):
            model.hidden(jnp.asarray(TOKENS), token_info(TOKENS, **given), states)
    following = TOKENS[:, ::-1]
    positions = count_positions(np.ones_like(MASK), start=MASK.sum(1))
    hidden, _ = model.hidden(jnp.asarray(following), token_info(following, positions=positions), after)
    whole = np.concatenate([TOKENS, following], axis=1)
    expected = model(whole, mask=np.concatenate([MASK, np.ones_like(MASK)], axis=1))[:, SEQ:]
    np.testing.assert_allclose(model.logits(hidden.x), expected, atol=1e-5)


RAW: Any = jax.random.PRNGKey(1)
KEYED = {
    "model": lambda model, key: model(TOKENS, key=key),
    "generate": lambda model, key: zoo.generate(model, TOKENS, max_new_tokens=4, temperature=1.0, key=key),
    "value": lambda model, key: evaluate(model, {"tokens": TOKENS, "targets": TOKENS}, key=key),
    "value_and_grad": lambda model, key: zoo.value_and_grad(zoo.cross_entropy, MESH)(
        model, {"tokens": TOKENS, "targets": TOKENS}, key=key
    )[0],
    "token_info": lambda model, key: jax.random.key_data(token_info(TOKENS, key=key).keys),
    "constructor": lambda model, key: zoo.models.Mamba(**(SIZES | {"key": key})).embedding.weight,
    "init": lambda model, key: (
        zoo.init(lambda key: zoo.models.Mamba(**(SIZES | {"key": key})), key, MESH).embedding.weight
    ),
    "lora": lambda model, key: jax.tree.leaves(zoo.trainable(zoo.adapters.lora(make_stacked(), rank=2, key=key)))[0],
}


@pytest.mark.one_case("slow")
@pytest.mark.parametrize("entrance", KEYED)
def test_keys_of_both_styles_are_one_key(no_type_checks, entrance):
    call, model = KEYED[entrance], make_model("attention")
    expected = np.asarray(call(model, KEY))
    for key in (RAW, np.asarray(RAW)):
        np.testing.assert_allclose(np.asarray(call(model, key)), expected, atol=1e-6)
    with pytest.raises(TypeError, match=r"key: expected a PRNG key, as jax\.random\.key\(0\) makes it, got int"):
        call(model, 0)


def test_keys_are_one_per_row_or_one(no_type_checks):
    model, keys = make_model("attention"), jax.random.split(KEY, 3)
    expected = model(TOKENS, key=keys)
    np.testing.assert_allclose(model(TOKENS, key=KEY), expected, atol=1e-6)
    np.testing.assert_allclose(model(TOKENS, key=jax.random.split(RAW, 3)), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"expected one PRNG key, or one for each of 3 rows, got \(2,\)"):
        model(TOKENS, key=keys[:2])
