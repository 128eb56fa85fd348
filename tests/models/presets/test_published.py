"""Presets have their published sizes, small variants work, and errors name invalid names and changes."""

import dataclasses
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.quick import mark_slow
from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES
from zoo.models.presets.published import PRESETS, preset

KEY = jax.random.key(0)
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
ONE_PER_FAMILY = {entry.family: name for name, entry in PRESETS.items()}
VARIED = [ONE_PER_FAMILY[family] for family in ("llama", "deepseek_v3", "gpt_oss", "qwen3_moe", "mamba2")]
"""Presets whose layers have least in common; `pytest -m slow tests/models/presets` runs one of each family."""


def small(name, **changes):
    """Build a narrow model of a preset's architecture: two kv heads if the family has any, head dim 16."""
    family = FAMILIES[PRESETS[name].family]
    possible = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    possible |= {"num_heads": 8, "attention_hidden_size": 64}
    possible |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    possible |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 128)
    if "kv_lora_rank" in family.defaults:  # one key per head
        possible |= {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "v_head_dim": 16}
        possible |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {key: value for key, value in possible.items() if key in family.defaults}
    mlp = {} if family.name in ("gpt2", "mamba2") else {"intermediate_size": 128}
    return preset(name, key=KEY, **{**SMALL, **sizes, **mlp, **changes})


@functools.cache
def published_shapes(name):
    return shapes(name)


@pytest.mark.one_case
@pytest.mark.parametrize("name", mark_slow(PRESETS, but=ONE_PER_FAMILY.values()))
def test_preset_has_its_published_number_of_parameters(name):
    model = published_shapes(name)
    assert zoo.count(model) == PRESETS[name].parameters
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", [name for name, entry in PRESETS.items() if entry.active_parameters is not None])
def test_preset_has_its_published_active_parameters(name):
    """To the published digits, which are rounded or truncated."""
    published = PRESETS[name].active_parameters
    last_digit = 10 ** (len(str(published)) - len(str(published).rstrip("0")))
    model = published_shapes(name)
    active = zoo.models.count_active_parameters(model) - PRESETS[name].active_excludes_embedding * zoo.count(
        model.embedding
    )
    assert abs(active - published) < last_digit
    assert active < PRESETS[name].parameters


@pytest.mark.parametrize("name", PRESETS)
def test_preset_config_keys_differ_from_defaults(name):
    entry = PRESETS[name]
    family = FAMILIES[entry.family]
    config = read_config(family, entry.config)
    for key in entry.config.keys() - {"rope_scaling"}:
        without = {other: value for other, value in entry.config.items() if other != key}
        is_default = read_config(family, without) == config
        sizes = ("hidden", "intermediate", "num_", "n_")  # a row of sizes is complete
        assert not is_default or key.startswith(sizes), f"{key} is the family's default"


def test_presets_cover_all_families():
    assert set(ONE_PER_FAMILY) <= set(zoo.families())
    assert zoo.models.list_presets() == tuple(PRESETS) and len(PRESETS) == len(
        {entry.source for entry in PRESETS.values()}
    )


def first_child(module, *names):
    return next(child for name in names if (child := getattr(module, name, None)) is not None)


@pytest.mark.one_case
@pytest.mark.parametrize("name", mark_slow(ONE_PER_FAMILY.values(), but=[VARIED[0], VARIED[-1]]))
def test_preset_initialization_scales(name):
    model = small(name)
    *_, block = model.stack.iter_blocks()
    ffn = getattr(block, "ffn", None)
    ffn = getattr(ffn, "experts", ffn)
    reads = [first_child(block.mixer, "query", "query_down", "gate", "receptance")]
    writes = [block.mixer.out]
    if ffn is not None:
        reads, writes = [*reads, first_child(ffn, "up", "key")], [*writes, first_child(ffn, "down", "value")]
    residual = (2 * len(writes)) ** -0.5

    def deviation(x):
        return float(jnp.std(x))

    for linear in reads:
        assert deviation(linear.weight) == pytest.approx(64**-0.5, rel=0.05)
    for linear in writes:
        assert deviation(linear.weight) == pytest.approx(linear.weight.shape[-1] ** -0.5 * residual, rel=0.05)
    assert deviation(model.embedding.weight) == pytest.approx(64**-0.5, rel=0.05)
    for linear in (*reads, *writes):
        assert getattr(linear, "bias", None) is None or not linear.bias.any()
    norm = block.mixer_norm
    assert (norm.weight + getattr(norm, "offset", 0.0) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_PER_FAMILY.values())
def test_preset_save_and_load_roundtrip(name, tmp_path):
    model = small(name)
    zoo.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == PRESETS[name].family and config["num_hidden_layers"] == 2
    loaded, model = (dataclasses.replace(x, origin=None) for x in (zoo.load(tmp_path), model))
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    assert all(map(jnp.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(model)))


@pytest.mark.slow
def test_preset_initialized_on_a_mesh_is_the_same():
    sizes = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    make = lambda key: zoo.models.preset("qwen3-0.6b", key=key, **sizes)
    model = zoo.init(make, KEY, zoo.make_mesh(fsdp=2, tensor=2, data=2))
    unsharded = make(KEY)
    assert model.origin == unsharded.origin
    assert all(map(jnp.allclose, jax.tree.leaves(model), jax.tree.leaves(unsharded)))
    assert model.embedding.weight.sharding.spec == jax.sharding.PartitionSpec("tensor", "fsdp")


def shapes(name, **changes):
    return eqx.filter_eval_shape(lambda: preset(name, key=KEY, **changes))


def config_of(name, **changes):
    return json.loads(shapes(name, **changes).origin.config)


def test_preset_changes_replace_keys_under_any_name():
    assert config_of("gpt2", n_layer=2) == config_of("gpt2") | {"n_layer": 2}
    canonical = config_of("gpt2", num_hidden_layers=2)
    assert canonical["num_hidden_layers"] == 2 and "n_layer" not in canonical
    assert zoo.count(shapes("gpt2", n_layer=2)) == zoo.count(shapes("gpt2", num_hidden_layers=2)) < 60e6
    assert zoo.count(shapes("llama3-8b", num_hidden_layers=2)) < PRESETS["llama3-8b"].parameters / 5
    assert shapes("llama3-8b", tie_word_embeddings=True).head is None
    assert config_of("llama3-8b", eos_token_id=7)["eos_token_id"] == 7, "ignored keys are saved too"


def test_preset_changes_of_rope():
    def rotary(**changes):
        return next(iter(shapes("llama3.1-8b", **changes).stack.iter_blocks())).mixer.rotary

    assert rotary().base == 500000 and rotary().scaling.factor == 8
    assert rotary(rope_theta=1e4).base == 1e4 and rotary(rope_theta=1e4).scaling.factor == 8
    assert rotary(rope_scaling=None).scaling is None and rotary(rope_scaling=None).base == 500000
    unscaled = rotary(rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert (unscaled.scaling, unscaled.base) == (None, 7.0)


def test_preset_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="no preset 'llama-3-8b'; nearest are llama3-8b, "):
        preset("llama-3-8b", key=KEY)
    with pytest.raises(ValueError, match="nearest are llama3-8b"):
        preset("meta-llama/Meta-Llama-3-8B", key=KEY)
    with pytest.raises(ValueError, match=f"there are {next(iter(PRESETS))}, .*, tinyllama-1.1b"):
        preset("something-else", key=KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_sizes": 2},
            "llama3-8b with another hidden_sizes: hidden_sizes = 2 is not a key .* mean 'hidden_size'",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 should be a whole number above 0"),
        (
            {"num_attention_heads": 12},
            "12 heads do not divide evenly over 8 kv_heads|does not divide evenly over 12",
        ),
        ({"hidden_act": "gloo"}, "activation 'gloo' is none that we know"),
        ({"rope_scaling": {"rope_type": "lama3"}}, "rope_type = 'lama3' is not a known kind"),
        ({"model_type": "qwen3"}, "model_type cannot be changed: the preset is a llama"),
    ],
)
def test_preset_refuses_invalid_changes(changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        preset("llama3-8b", key=KEY, **changes)
    assert "ignore=" not in str(raised.value), "preset has no such argument"


def test_preset_computes_logits_of_unit_scale():
    model = small("qwen2.5-0.5b")
    logits = eqx.filter_jit(lambda model, tokens: model(tokens))(model, jnp.arange(12).reshape(2, 6))
    assert logits.shape == (2, 6, 64) and jnp.isfinite(logits).all()
    assert float(jnp.std(logits)) == pytest.approx(1, rel=0.3), "of the order of 1"
