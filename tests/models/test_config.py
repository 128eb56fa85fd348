"""Every key of a config is honored, refused by name, or known to change nothing; whatever its spelling and family."""

import itertools
import json
from functools import lru_cache, partial

import equinox as eqx
import jax
import pytest

from zoo.models.hf.config import IGNORED_KEYS, REQUIRED_VALUES, ROPE_TYPE_KEYS, ConfigError, read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.parameter_paths import find_differences

SMALL = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "n_group": 4,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_heads": 4,
    "n_groups": 2,
    "state_size": 3,
}
ANOTHER = {
    "vocab_size": 13,
    "hidden_size": 64,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "sliding_window": 5,
    "max_window_layers": 3,
    "hidden_act": "relu",
    "rope_parameters": {"rope_theta": 5.0},
    "rope_theta": 7.0,
    "partial_rotary_factor": 0.5,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_experts_per_tok": 1,
    "n_routed_experts": 16,
    "n_group": 2,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "first_k_dense_replace": 2,
    "n_shared_experts": 2,
    "mlp_only_layers": [1],
    "clip_qkv": 0.5,
    "quantization_config": {"quant_method": "mxfp4"},
    "n_groups": 4,
    "time_step_limit": [0.0, 0.05],
    "time_step_rank": 5,
    "attention_hidden_size": 24,
}
"""A value other than the small model's; what is not listed is made from its default."""
CONTEXTS = [
    {},
    {"sliding_window": 4, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    {"topk_method": "group_limited_greedy", "mlp_only_layers": [0]},
]
"""Some keys count only beside others."""

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
ROTARY = pytest.mark.parametrize(
    "family", [family for family in FAMILIES.values() if "rope_parameters" in family.defaults], ids=str
)


def word_for(family, key):
    """What the family's own files call a key."""
    return {usual: word for word, usual in family.aliases.items()}.get(key, key)


def small(family, **more):
    left_out = {"intermediate_size"} if "expand" in family.defaults else set()  # one of the two says how wide it is
    known = family.defaults.keys() - left_out
    return {word_for(family, key): value for key, value in (SMALL | more).items() if key in known}


@lru_cache(maxsize=64)
def built_from(name, text):
    family = FAMILIES[name]
    config = read_config(family, json.loads(text))
    return eqx.filter_eval_shape(partial(family.build, config), key=jax.random.key(0))


def built(family, given):
    return built_from(family.name, json.dumps(given))


def another(key, default):
    if key in ANOTHER:
        return ANOTHER[key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return type(default)(default * 2 or 1)
    pytest.fail(f"the value {default!r} of {key!r} says nothing of others: list one in ANOTHER")


def read_or_refused(family, given):
    """The model of a config, or the message with which it was refused: by `read_config`, or by what it builds."""
    try:
        return built(family, given)
    except ValueError as error:
        assert str(error)
        return str(error)


@EACH
def test_every_key_is_honored(family):
    """Changing it changes the model, or is refused by name, alone or beside another key."""
    for key, default in family.defaults.items():
        found = []
        for context in CONTEXTS:
            given = small(family, **context)
            word = word_for(family, key)
            changed = read_or_refused(family, given | {word: another(key, default)})
            if isinstance(changed, str):
                assert word in changed or key in ("hidden_size", "num_attention_heads", "head_dim")
            found.append(isinstance(changed, str) or any(find_differences(changed, built(family, given))))
        assert any(found), f"{family.name}: {key} = {another(key, default)!r} changes nothing"


@EACH
def test_defaults_are_what_an_empty_config_says(family):
    config = read_config(family, {})
    assert {key: config[key] for key in family.defaults if key != "rope_parameters"} == {
        key: value for key, value in family.defaults.items() if key != "rope_parameters"
    }
    assert read_config(family, {"model_type": family.name, "architectures": [family.architecture]}) == config
    if "rope_parameters" in family.defaults:
        assert config["rope_parameters"] == {"rope_type": "default"} | family.defaults["rope_parameters"]
    assert family.defaults.keys().isdisjoint(
        (IGNORED_KEYS | REQUIRED_VALUES.keys() | family.ignored_keys) - {"quantization_config"}
    )


@EACH
def test_aliases_are_their_usual_words(family):
    for word, usual in family.aliases.items():
        value = another(usual, family.defaults.get(usual))
        config = read_config(family, {word: value})
        assert (config if usual in family.defaults else config["rope_parameters"])[usual] == value
        if usual not in family.required_values:
            assert config == read_config(family, {usual: value}) == read_config(family, {usual: value, word: value})
            if usual in family.defaults:
                with pytest.raises(ConfigError, match="say different things"):
                    read_config(family, {word: value, usual: family.defaults[usual]})
        assert config == read_config(
            family, {word: value, usual: None} if usual in family.required_values else {word: value}
        )


SCALINGS = [
    {},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16, "truncate": False},
    {"rope_type": "longrope", "short_factor": 1.5, "long_factor": 2.5},
]


def scaled(family, scaling):
    """With as many factors as pairs of values are turned in this family."""
    pairs = next(built(family, small(family)).stack.iter_blocks()).mixer.rotary.dim // 2
    listed = lambda key, value: [value] * pairs if key in ("short_factor", "long_factor") else value
    return {key: listed(key, value) for key, value in scaling.items()}


@ROTARY
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.get("rope_type", "default"))
def test_both_spellings_of_rotary_embeddings_are_one(family, scaling):
    """transformers 5 writes one table; older files a base, a scaling whose kind is its `type`, or its `rope_type`."""
    base, scaling = word_for(family, "rope_theta"), scaled(family, scaling)
    usual = family.defaults["rope_parameters"].get("rope_type", "default")
    facts = {"rope_theta": 500.0} | {key: value for key, value in scaling.items() if key != "rope_type"}
    kind = scaling.get("rope_type", "default")
    new = read_config(family, {"rope_parameters": facts | {"rope_type": kind}})
    without = {key: value for key, value in facts.items() if key != "rope_theta"}
    for word in ("type", "rope_type"):
        for older in [without | {word: kind}] + ([None, {}] if kind == usual == "default" else []):
            assert read_config(family, {base: 500.0, "rope_scaling": older}) == new
    assert new["rope_parameters"]["rope_theta"] == 500.0 and new["rope_parameters"]["rope_type"] == kind
    nulls = dict.fromkeys(
        {key for needed, possible in ROPE_TYPE_KEYS.values() for key in (*needed, *possible)} - facts.keys()
    )
    assert read_config(family, {"rope_parameters": nulls | facts | {"rope_type": kind}}) == new, "nulls are absent"
    model = built(family, small(family) | {"rope_parameters": facts | {"rope_type": kind}})
    rotary = next(model.stack.iter_blocks()).mixer.rotary
    assert rotary.base == 500.0
    assert type(rotary.scaling).__name__.lower() == ("nonetype" if kind == "default" else kind)


@ROTARY
def test_every_number_of_a_scaling_counts(family):
    for scaling in (scaled(family, scaling) for scaling in SCALINGS[1:]):
        given = small(family) | {"rope_parameters": {"rope_theta": 500.0} | scaling}
        for key, value in scaling.items():
            other = {bool: lambda x: not x, list: lambda x: [2 * y for y in x]}.get(type(value), lambda x: 2 * x)
            if key != "rope_type":
                changed = given | {"rope_parameters": given["rope_parameters"] | {key: other(value)}}
                assert any(find_differences(built(family, changed), built(family, given))), (scaling, key)


@EACH
def test_unknown_keys_are_told_with_the_nearest(family):
    for key in family.defaults:
        misspelled = word_for(family, key) + key[-1]
        with pytest.raises(ConfigError) as raised:
            read_config(family, {misspelled: 1})
        text = str(raised.value)
        assert misspelled in text and "did you mean" in text and f"is not a key of {family.name}" in text
        assert "ignore=" in text
        assert read_config(family, {misspelled: 1}, ignore=(misspelled,)) == read_config(family, {})
        assert read_config(family, {misspelled: None}) == read_config(family, {}), "what is null asks for nothing"
    with pytest.raises(ConfigError) as raised:
        read_config(family, {"no_such_thing": 1, "nor_this": 2, "vocab_size": "3"})
    assert all(word in str(raised.value) for word in ("no_such_thing = 1", "nor_this = 2", "vocab_size = '3'"))


@EACH
def test_keys_that_would_change_the_result_are_refused_and_may_be_ignored(family):
    for key, allowed in {**REQUIRED_VALUES, **family.required_values}.items():
        for value in allowed:
            assert read_config(family, {key: value}) == read_config(family, {})
        for value in ({"bits": 4}, "something", [1], 17):
            with pytest.raises(ConfigError, match=f"{key} = .* would change the result"):
                read_config(family, {key: value})
            assert read_config(family, {key: value}, ignore={key}) == read_config(family, {})
    for key in IGNORED_KEYS | family.ignored_keys:
        assert read_config(family, {key: "anything"}) == read_config(family, {})


def test_ignored_keys_keep_their_defaults():
    llama = FAMILIES["llama"]
    for key, value in (("rms_norm_eps", "x"), ("vocab_size", 7), ("rope_scaling", {"type": "su"}), ("rope_theta", 5.0)):
        assert read_config(llama, {key: value}, ignore=(key,)) == read_config(llama, {})
    gpt2 = FAMILIES["gpt2"]
    assert read_config(gpt2, {"n_embd": 7}, ignore=("n_embd",)) == read_config(gpt2, {})


@EACH
def test_null_where_absent_is_meant(family):
    absent = {"num_key_value_heads", "head_dim", "sliding_window", "rope_parameters", "layer_types", "q_lora_rank"}
    for key, default in family.defaults.items():
        found = read_or_refused(family, small(family) | {word_for(family, key): None})
        if default is None and isinstance(found, str):
            assert found == f"{key} has to be given: the family has no usual value for it"
        elif key == "sliding_window" and isinstance(found, str):
            assert "layer_types has sliding_attention, and no sliding_window says how wide" in found
        elif default is None or key in absent:
            assert not isinstance(found, str), found
        else:
            assert isinstance(found, str) and word_for(family, key) in found


BAD = (
    "1",
    "",
    -1,
    0,
    0.5,
    1e300,
    2**31,
    10**30,
    True,
    False,
    [],
    [1],
    ["a"],
    [[1]],
    {},
    {"a": [{}]},
    float("nan"),
    1e999,
)


def keys_once():
    """Every key of every family, once: with the first family that has it."""
    met = set()
    for family, key in itertools.chain.from_iterable(zip(itertools.repeat(f), f.defaults) for f in FAMILIES.values()):
        if key not in met:
            met.add(key)
            yield family, key


@pytest.mark.parametrize("family, key", list(keys_once()), ids=str)
def test_values_of_another_kind_are_refused_or_honored(family, key):
    needed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    given = small(family, **needed, topk_method="group_limited_greedy")
    for value in BAD:
        if key == "num_hidden_layers" and value == 2**31:
            continue  # a list of so many layers: the loader holds them against the number of tensors first
        found = read_or_refused(family, given | {word_for(family, key): value})
        if not isinstance(found, str):
            right = given.get(word_for(family, key), family.defaults[key])
            absent = not value and key in ("rope_parameters", "mlp_only_layers")
            same = value == right or absent or key == "max_position_embeddings"
            assert same or any(find_differences(found, built(family, given))), value
