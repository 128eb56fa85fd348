"""Embeddings of texts: every mode against its formula, with padding on either side, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Origin
from zoo.models.text_embeddings import POOLINGS, find_pooling

SIZES = {"vocab": 32, "embed": 16, "layers": 1, "heads": 2, "mlp": 16, "key": jax.random.key(0)}
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
LENGTHS = (5, 8, 1)
TEXTS = [np.random.default_rng(0).integers(1, 32, length) for length in LENGTHS]


def pool(x, mode):
    """Pool the tokens of one text, "seq embed", in float64."""
    x, n = np.asarray(x, np.float64), len(x)
    return {
        "cls": lambda: x[0],
        "max": lambda: x.max(0),
        "mean": lambda: x.sum(0) / n,
        "mean_sqrt_len_tokens": lambda: x.sum(0) / n**0.5,
        "weightedmean": lambda: sum((i + 1) * x[i] for i in range(n)) / (n * (n + 1) / 2),
        "lasttoken": lambda: x[-1],
    }[mode]()


def pad(side):
    rows = [np.pad(text, (8 - len(text), 0) if side == "left" else (0, 8 - len(text))) for text in TEXTS]
    return jnp.asarray(rows), jnp.asarray(rows) > 0


@pytest.mark.ci
@pytest.mark.parametrize("make", [zoo.models.ModernBERT, zoo.models.Transformer])
def test_embeddings_equal_formulas_with_any_padding(make):
    model = make(**SIZES)
    assert tuple(POOLINGS) == MODES
    states = [zoo.hidden_states(model, jnp.asarray(text)[None])[-1][0] for text in TEXTS]
    expected = np.stack([np.concatenate([pool(x, mode) for mode in MODES]) for x in states])
    for side in ("left", "right"):
        tokens, mask = pad(side)
        np.testing.assert_allclose(zoo.embed(model, tokens, mask, pooling=MODES), expected, atol=1e-5)
    single = zoo.embed(model, jnp.asarray(TEXTS[1])[None], pooling=("mean", "normalize"))[0]
    mean = pool(states[1], "mean")
    np.testing.assert_allclose(single, mean / np.linalg.norm(mean), atol=1e-5)


@pytest.mark.slow
def test_embeddings_on_a_mesh_equal_serial():
    """Outside of `zoo.spmd` and inside."""
    model, (tokens, mask) = zoo.models.Transformer(**SIZES), pad("left")
    tokens, mask = (jnp.concatenate([x, x[:1]]) for x in (tokens, mask))
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    placed, embed = zoo.place(model, mesh), lambda *x: zoo.embed(*x, pooling=("mean", "lasttoken", "normalize"))
    expected = embed(model, tokens, mask)
    np.testing.assert_allclose(embed(placed, tokens, mask), expected, atol=1e-6)
    inside = zoo.spmd(embed, mesh, out="batch features")(placed, tokens, mask)
    np.testing.assert_allclose(inside, expected, atol=1e-6)


def test_embedding_of_padding_alone_is_nan():
    tokens, mask = pad("left")
    vectors = zoo.embed(zoo.models.Transformer(**SIZES), tokens, mask.at[0].set(False), pooling="lasttoken")
    assert np.isnan(vectors[0]).all() and np.isfinite(vectors[1:]).all()


def make_origin(kinds, config):
    types = [kind if "." in kind else f"sentence_transformers.models.{kind}" for kind in kinds]
    modules = [{"path": f"{i}_{name.rpartition('.')[2]}" if i else "", "type": name} for i, name in enumerate(types)]
    files = ("modules.json", json.dumps(modules)), ("1_Pooling/config.json", json.dumps(config))
    return Origin(FAMILIES["bert"], "{}", sentence_files=files)


def test_pooling_of_files_is_read():
    """Mean is the default. Switches of older files have a fixed order, and lists of newer ones their own."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    assert find_pooling(make_origin(kinds[:2], {"word_embedding_dimension": 16})) == (("mean",), False, 16)
    keys = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}
    for mode in MODES:
        off = {"pooling_mode_mean_tokens": False, "include_prompt": True}
        assert find_pooling(make_origin(kinds, off | {f"pooling_mode_{keys.get(mode, mode)}": True})).modes == (mode,)
        assert find_pooling(make_origin(kinds, {"pooling_mode": mode})) == ((mode,), True, None)
    both = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}
    assert find_pooling(make_origin(kinds, both)).modes == ("cls", "lasttoken")
    assert find_pooling(make_origin(kinds, {"pooling_mode": ["mean", "cls"]})).modes == ("mean", "cls")
    newer = [f"sentence_transformers.base.modules.{kind.lower()}.{kind}" for kind in kinds]
    assert find_pooling(make_origin(newer, {"embedding_dimension": 16})) == (("mean",), True, 16)


@pytest.mark.parametrize(
    ("kinds", "config", "message"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "the modules Transformer, Pooling, Dense, and covered are"),
        (["custom_st.Transformer", "Pooling"], {}, "the modules custom_st.Transformer, Pooling"),
        (["Transformer", "Normalize", "Pooling"], {}, "in this order"),
        (["Transformer", "Pooling"], {"pooling_mode_gru": True}, "the key pooling_mode_gru, which is not covered"),
        (["Transformer", "Pooling"], {"include_prompt": False}, "leaves prompts out"),
        (["Transformer", "Pooling"], {"pooling_mode": "median"}, "pooling_mode = 'median', and known are cls"),
        (["Transformer", "Pooling"], {"pooling_mode": ["cls", []]}, r"pooling_mode = \['cls', \[\]\]"),
    ],
)
def test_modules_that_are_not_covered_are_refused(kinds, config, message):
    with pytest.raises(ValueError, match=message):
        find_pooling(make_origin(kinds, config))


def test_embed_refuses_by_name(no_type_checks):
    model, (tokens, mask) = zoo.models.Transformer(**SIZES), pad("left")
    with pytest.raises(ValueError, match=r"comes with no modules\.json"):
        zoo.embed(model, tokens, mask)
    with pytest.raises(ValueError, match="pooling 'median': known are cls"):
        zoo.embed(model, tokens, mask, pooling="median")
    with pytest.raises(ValueError, match=r"pooling \(\) names no mode"):
        zoo.embed(model, tokens, mask, pooling=())
    with pytest.raises(ValueError, match="the shape of tokens"):
        zoo.embed(model, tokens, mask[:1], pooling="mean")
    with pytest.raises(ValueError, match="2: segment ids of packed rows are not a mask"):
        zoo.embed(model, tokens, 2 * mask.astype(int), pooling="mean")
    with pytest.raises(TypeError, match="a Decoder or an Encoder, not by Linear"):
        zoo.embed(zoo.layers.Linear(2, 2, key=SIZES["key"]), tokens, pooling="mean")
