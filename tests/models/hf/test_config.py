"""Every config key is honored, refused by name, or known to change nothing, in every spelling and family."""

import itertools
import json
from functools import lru_cache, partial

import equinox as eqx
import jax
import pytest

from zoo.models.hf.config import IGNORED_KEYS, REQUIRED_VALUES, ROPE_TYPE_KEYS, ConfigError, read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.parameter_paths import find_differences
from zoo.ops.rotary import ReversedRotation, YarnScaling

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
    "rotary_dim": 16,
    "full_attention_interval": 2,
}
ANOTHER = {
    "vocab_size": 13,
    "hidden_size": 96,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "sliding_window": 5,
    "max_window_layers": 3,
    "hidden_act": "tanh",
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
    "sliding_window_pattern": 2,
    "sliding_rope_theta": 3.0,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "rotary_dim": 8,
    "no_rope_layers": [1, 0, 1],
    "no_rope_layer_interval": 2,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "global_attn_every_n_layers": 2,
    "hybrid_layer_pattern": [1, 1, 0],
    "moe_layer_pattern": [0, 1, 0],
    "sliding_window_size": 5,
    "moe_layers": [0, 1],
    "attention_chunk_size": 3,
    "architectures": ["NoSuchModel"],
    "classifier_pooling": "mean",
    "classifier_activation": "relu",
    "pad_token_id": 3,
    "num_labels": 3,
    "pooler_output_size": 48,
    "pooler_act": "gelu",
    "routed_scaling_factor": 3.5,
    "id2label": {"0": "cat", "1": "dog", "2": "axolotl"},
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"), 3),
    "word_embed_proj_dim": 8,
    "num_ln_in_parallel_attn": 1,
    "attn_config": {"clip_qkv": 0.5},
    "pos_att_type": ["c2p"],
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 6,
    "max_relative_positions": 10,
    "attention_head_size": 8,
    "pooler_hidden_size": 24,
    "pooler_hidden_act": "relu",
    "indexer_types": ["full", "shared", "full"],
    "index_topk_pattern": "FSF",
    "full_attention_interval": 3,
    "rescale_every": 2,
    "num_global_key_value_heads": 1,
    "per_layer_config": {"1": {"head_dim": 8}},
}
"""Values other than the small model's. For keys that are not listed, one is derived from the default."""
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c"], "position_buckets": 4}
CONTEXTS = [
    {},
    {"sliding_window": 4, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"sliding_window": 4, "no_rope_layers": [0, 1, 1]},
    {"use_sliding_window": True, "sliding_window": 4, "no_rope_layers": [0, 1, 1]},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    {"topk_method": "group_limited_greedy", "mlp_only_layers": [0]},
    {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1]},
    {"architectures": ["ViTModel"]},
    *({"architectures": [f"{name}ForSequenceClassification"]} for name in ("Bert", "Roberta", "XLMRoberta")),
    *({"architectures": [f"{name}ForSequenceClassification"]} for name in ("ModernBert", "EuroBert")),
    {"new_decoder_architecture": True},
    {"index_topk_freq": 2},
    RELATIVE,
    {"architectures": ["DebertaV2ForSequenceClassification"]},
    {"attention_k_eq_v": True},
    {"num_kv_shared_layers": 1, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
]
"""Some keys have an effect only together with others."""

EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
ROTARY_FAMILIES = [
    family
    for family in FAMILIES.values()
    if "rope_parameters" in family.defaults and "full_attention" not in family.defaults["rope_parameters"]
]
ROTARY = pytest.mark.parametrize("family", ROTARY_FAMILIES, ids=str)


HAS_ROPE_BY_TYPE = [
    family for family in FAMILIES.values() if "full_attention" in family.defaults.get("rope_parameters", {})
]
"""Families whose `rope_parameters` have a table for each type of layers, with tests of their own."""


READ_BY_SOME = {"architectures", "id2label", "num_labels", "pad_token_id"}
"""Keys that some families read, and that change nothing in others."""


def alias_of(family, key):
    """Return the name of a canonical key in the files of a family."""
    return {canonical: alias for alias, canonical in family.aliases.items()}.get(key, key)


def small(family, **more):
    omitted = {"intermediate_size"} if "expand" in family.defaults else set()  # the two determine each other
    known = family.defaults.keys() - omitted
    if family.name == "mimo_v2_flash":  # a third of 16 values is no whole number of pairs
        more = {"hidden_size": 48, "head_dim": 18, "num_attention_heads": 8} | more
    if family in HAS_ROPE_BY_TYPE and "rope_parameters" in more:
        tables = {"full_attention": more["rope_parameters"], "sliding_attention": {}}
        more = more | {"rope_parameters": tables, "layer_types": ["full_attention"] * 3}
    return {alias_of(family, key): value for key, value in (SMALL | more).items() if key in known}


@lru_cache(maxsize=64)
def build_from_text(name, text):
    family = FAMILIES[name]
    config = read_config(family, json.loads(text))
    return eqx.filter_eval_shape(partial(family.build, config), key=jax.random.key(0))


def build(family, given):
    return build_from_text(family.name, json.dumps(given))


def other_value(key, default):
    if key in ANOTHER:
        return ANOTHER[key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return type(default)(default * 2 or 1)
    pytest.fail(f"the value {default!r} of {key!r} does not suggest another: list one in ANOTHER")


def build_or_error(family, given):
    """Return the model of a config, or the error message of `read_config` or of `Family.build`."""
    try:
        return build(family, given)
    except ValueError as error:
        assert str(error)
        return str(error)


@EACH
def test_config_keys_are_honored_or_refused(family):
    """Changing a key changes the model, or raises with its name, alone or together with another key."""
    for key, default in family.defaults.items():
        assert any(has_effect(family, key, small(family, **context), default) for context in CONTEXTS), (
            f"{family.name}: {key} = {other_value(key, default)!r} changes nothing"
        )


def has_effect(family, key, given, default):
    """Compare the models of two configs, or check the error that the changed one raises."""
    if isinstance(build_or_error(family, given), str):  # a context of other families
        return False
    alias = alias_of(family, key)
    changed = build_or_error(family, given | {alias: other_value(key, default)})
    if isinstance(changed, str):
        assert alias in changed or key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim")
        return True
    return any(find_differences(changed, build(family, given))) or key in ONLY_NAMES


ONLY_NAMES = ("legacy",)
"""Keys that change the names of tensors, and nothing else."""


@EACH
def test_config_defaults_are_those_of_an_empty_file(family):
    config = read_config(family, {})
    assert {key: config[key] for key in family.defaults if key != "rope_parameters"} == {
        key: value for key, value in family.defaults.items() if key != "rope_parameters"
    }
    named = read_config(family, {"model_type": family.name, "architectures": [family.architecture]})
    assert named == config | ({"architectures": [family.architecture]} if "architectures" in family.defaults else {})
    if family in HAS_ROPE_BY_TYPE:
        for kind, default in family.defaults["rope_parameters"].items():
            assert config["rope_parameters"][kind] == {"rope_type": "default"} | default
    elif "rope_parameters" in family.defaults:
        assert config["rope_parameters"] == {"rope_type": "default"} | family.defaults["rope_parameters"]
    assert family.defaults.keys().isdisjoint(
        (IGNORED_KEYS | REQUIRED_VALUES.keys() | family.ignored_keys)
        - READ_BY_SOME
        - {"quantization_config", "per_layer_config"}
    )


@EACH
def test_config_aliases_equal_canonical_keys(family):
    for alias, canonical in family.aliases.items():
        value = other_value(canonical, family.defaults.get(canonical))
        config = read_config(family, {alias: value})
        rope = config.get("rope_parameters", {})
        rope = rope["full_attention"] if family in HAS_ROPE_BY_TYPE else rope
        assert (config if canonical in family.defaults else rope)[canonical] == value
        if canonical not in family.required_values:
            assert (
                config
                == read_config(family, {canonical: value})
                == read_config(family, {canonical: value, alias: value})
            )
            if canonical in family.defaults:
                with pytest.raises(ConfigError, match="say different things"):
                    read_config(family, {alias: value, canonical: family.defaults[canonical]})
        assert config == read_config(
            family, {alias: value, canonical: None} if canonical in family.required_values else {alias: value}
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


def rotary_of(model):
    """Return the RoPE of the first layer that has one."""
    mixers = (block.mixer for block in model.stack.iter_blocks())
    return next(mixer.rotary for mixer in mixers if hasattr(mixer, "rotary"))


def expand_factors(family, scaling):
    """Repeat LongRoPE factors for each rotated pair of this family."""
    pairs = rotary_of(build(family, small(family))).dim // 2
    repeat = lambda key, value: [value] * pairs if key in ("short_factor", "long_factor") else value
    return {key: repeat(key, value) for key, value in scaling.items()}


def list_spellings():
    """Yield every family with one kind of scaling in turn, and a few families with all kinds; the rest is slow."""
    for number, family in enumerate(ROTARY_FAMILIES):
        for turn, scaling in enumerate(SCALINGS):
            quick = number % len(SCALINGS) == turn or family.name in ("llama", "gpt_neox", "phi3", "deepseek_v3")
            name = f"{family.name}-{scaling.get('rope_type', 'default')}"
            yield pytest.param(family, scaling, id=name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("family, scaling", list(list_spellings()))
def test_config_spellings_of_rope_are_equal(family, scaling):
    """transformers 5 writes `rope_parameters`, older files `rope_theta` and `rope_scaling`."""
    base, scaling = alias_of(family, "rope_theta"), expand_factors(family, scaling)
    usual = family.defaults["rope_parameters"].get("rope_type", "default")
    parameters = {"rope_theta": 500.0} | {key: value for key, value in scaling.items() if key != "rope_type"}
    kind = scaling.get("rope_type", "default")
    new = read_config(family, {"rope_parameters": parameters | {"rope_type": kind}})
    without = {key: value for key, value in parameters.items() if key != "rope_theta"}
    for type_key in ("type", "rope_type"):
        for older in [without | {type_key: kind}] + ([None, {}] if kind == usual == "default" else []):
            assert read_config(family, {base: 500.0, "rope_scaling": older}) == new
    assert new["rope_parameters"]["rope_theta"] == 500.0 and new["rope_parameters"]["rope_type"] == kind
    nulls = dict.fromkeys(
        {key for needed, possible in ROPE_TYPE_KEYS.values() for key in (*needed, *possible)} - parameters.keys()
    )
    assert read_config(family, {"rope_parameters": nulls | parameters | {"rope_type": kind}}) == new, (
        "null equals absent"
    )
    model = build(family, small(family) | {"rope_parameters": parameters | {"rope_type": kind}})
    rotary = rotary_of(model)
    assert rotary.base == 500.0
    scaling = rotary.scaling.scaling if isinstance(rotary.scaling, ReversedRotation) else rotary.scaling
    assert type(scaling).__name__.removesuffix("Scaling").lower() == ("nonetype" if kind == "default" else kind)


@pytest.mark.parametrize("family", HAS_ROPE_BY_TYPE, ids=str)
def test_config_rope_of_each_layer_type_is_read_and_honored(family):
    """Older files have one `rope_theta` and the scaling of full layers."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    sliding = family.defaults["rope_parameters"]["sliding_attention"]["rope_theta"]
    same = sliding == family.defaults["rope_parameters"]["full_attention"]["rope_theta"]
    sliding = {"rope_theta": 500.0 if same else sliding}
    tables = {"full_attention": yarn | {"rope_theta": 500.0}, "sliding_attention": sliding}
    new = read_config(family, {"rope_parameters": tables})
    assert new == read_config(family, {"rope_theta": 500.0, "rope_scaling": yarn})
    assert new["rope_parameters"]["full_attention"]["rope_type"] == "yarn"
    given = small(family, layer_types=ANOTHER["layer_types"], sliding_window=4)
    first, *_, last = build(family, given | {"rope_parameters": tables}).stack.iter_blocks()
    assert first.mixer.rotary.scaling is None and isinstance(last.mixer.rotary.scaling, YarnScaling)
    assert (first.mixer.rotary.base, last.mixer.rotary.base) == (sliding["rope_theta"], 500.0)
    for wrong in ({"full": yarn}, {"full_attention": 3}, yarn):
        with pytest.raises(ConfigError, match="rope_parameters"):
            read_config(family, {"rope_parameters": wrong})


@ROTARY
def test_config_rope_scaling_parameters_change_the_model(family):
    for scaling in (expand_factors(family, scaling) for scaling in SCALINGS[1:]):
        given = small(family) | {"rope_parameters": {"rope_theta": 500.0} | scaling}
        for key, value in scaling.items():
            other = {bool: lambda x: not x, list: lambda x: [2 * y for y in x]}.get(type(value), lambda x: 2 * x)
            if key != "rope_type":
                changed = given | {"rope_parameters": given["rope_parameters"] | {key: other(value)}}
                assert any(find_differences(build(family, changed), build(family, given))), (scaling, key)


@EACH
def test_config_unknown_key_suggests_the_nearest(family):
    for key in family.defaults:
        misspelled = alias_of(family, key) + key[-1]
        with pytest.raises(ConfigError) as raised:
            read_config(family, {misspelled: 1})
        text = str(raised.value)
        assert misspelled in text and "did you mean" in text and f"is not a key of {family.name}" in text
        assert "ignore=" in text
        assert read_config(family, {misspelled: 1}, ignore=(misspelled,)) == read_config(family, {})
        assert read_config(family, {misspelled: None}) == read_config(family, {}), "null is ignored"
    with pytest.raises(ConfigError) as raised:
        read_config(family, {"no_such_thing": 1, "nor_this": 2, "vocab_size": "3"})
    assert all(word in str(raised.value) for word in ("no_such_thing = 1", "nor_this = 2", "vocab_size = '3'"))


@EACH
def test_config_required_values_are_enforced_unless_ignored(family):
    for key, allowed in {**REQUIRED_VALUES, **family.required_values}.items():
        if key == "per_layer_config" and key in family.defaults:
            continue  # this family reads it
        for value in allowed:
            assert read_config(family, {key: value}) == read_config(family, {})
        for value in ({"bits": 4}, "something", [1], 17):
            with pytest.raises(ConfigError, match=f"{key} = .* would change the result"):
                read_config(family, {key: value})
            assert read_config(family, {key: value}, ignore={key}) == read_config(family, {})
    for key in (IGNORED_KEYS | family.ignored_keys) - family.defaults.keys() - family.required_values.keys():
        assert read_config(family, {key: "anything"}) == read_config(family, {})


def test_config_ignored_keys_keep_their_defaults():
    llama = FAMILIES["llama"]
    for key, value in (("rms_norm_eps", "x"), ("vocab_size", 7), ("rope_scaling", {"type": "su"}), ("rope_theta", 5.0)):
        assert read_config(llama, {key: value}, ignore=(key,)) == read_config(llama, {})
    gpt2 = FAMILIES["gpt2"]
    assert read_config(gpt2, {"n_embd": 7}, ignore=("n_embd",)) == read_config(gpt2, {})


@EACH
def test_config_null_equals_absent(family):
    absent = {"num_key_value_heads", "head_dim", "sliding_window", "rope_parameters", "layer_types", "q_lora_rank"}
    absent |= {"attn_logit_softcapping", "final_logit_softcapping", "attention_value_scale"}
    for key, default in family.defaults.items():
        found = build_or_error(family, small(family) | {alias_of(family, key): None})
        if default is None and isinstance(found, str):
            assert found == f"{key} has to be given: the family has no usual value for it"
        elif key == "sliding_window" and isinstance(found, str):
            assert "layer_types has sliding_attention, and no sliding_window says how wide" in found
        elif key == "q_lora_rank" and isinstance(found, str):
            assert "the indexer reads the latent of queries" in found
        elif (default is None or key in absent) and (family.name, key) != ("mimo_v2_flash", "num_key_value_heads"):
            assert not isinstance(found, str), found
        else:
            assert isinstance(found, str) and alias_of(family, key) in found


BEYOND_THE_LAST = (
    *("max_position_embeddings", "sliding_window_pattern", "no_rope_layer_interval", "global_attn_every_n_layers"),
    *("index_topk_freq", "index_skip_topk_offset", "rescale_every"),
)
"""Keys of which a value larger than the number of tokens or layers is the same as another."""
MAY_BE_EMPTY = ("rope_parameters", "mlp_only_layers", "no_rope_layers", "architectures", "id2label")
NEEDS_ARCHITECTURE = {"vit": ["ViTModel"], "bert": ["BertForSequenceClassification"]}
NEEDS_NO_ROPE_LAYERS = ("attn_temperature_tuning", "floor_scale", "attn_scale")
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


def list_keys():
    """Yield every key once, with the first family that has it."""
    seen = set()
    for family, key in itertools.chain.from_iterable(zip(itertools.repeat(f), f.defaults) for f in FAMILIES.values()):
        if key not in seen:
            seen.add(key)
            yield family, key


@pytest.mark.parametrize("family, key", list(list_keys()), ids=str)
def test_config_invalid_values_are_refused_or_honored(family, key):
    needed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    needed |= {"interleave_moe_layer_step": 3, "architectures": NEEDS_ARCHITECTURE.get(family.name)}
    needed |= {"no_rope_layers": [1, 0, 1]} if key in NEEDS_NO_ROPE_LAYERS else {}
    if family.name == "deberta-v2":
        needed |= RELATIVE | {"architectures": ["DebertaV2ForSequenceClassification"]}
    if "num_kv_shared_layers" in family.defaults:  # some keys count in layers that see all tokens, or that reuse keys
        needed |= {"attention_k_eq_v": True, "num_kv_shared_layers": 1}
        needed |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    given = small(family, **needed, topk_method="group_limited_greedy")
    for value in BAD:
        if key == "num_hidden_layers" and value == 2**31:
            continue  # too many layers to build: the loader compares with the number of tensors first
        found = build_or_error(family, given | {alias_of(family, key): value})
        if not isinstance(found, str):
            right = given.get(alias_of(family, key), family.defaults[key])
            absent = not value and key in MAY_BE_EMPTY
            same = value == right or absent or key in (*BEYOND_THE_LAST, *ONLY_NAMES)
            assert same or any(find_differences(found, build(family, given))), value


WRONG_VALUES = {
    bool: ("false", 0, 1, 1.0, [], [0], {}),
    int: ("2", 2.0, True, [2], {}, 10**400),
    float: ("1e-5", True, [1.0], {}, float("nan"), float("inf"), 10**400),
    str: (True, 1.5, ["silu"], {}),
    list: ("yes", True, {}, [True, 2.0]),
    dict: ("yes", True, 0, [], 1.5),
    type(None): ("yes", True, -1, {"x": 1}, [1.5]),
}
"""Values of other types than a default; most of them have a truth, which Python would take for the value."""


@EACH
def test_config_values_are_read_by_type(family):
    for key, default in family.defaults.items():
        alias = alias_of(family, key)
        for value in WRONG_VALUES[type(default)]:
            if key == "moe_topk" and isinstance(value, list):
                continue  # one number for each layer
            with pytest.raises(ConfigError, match=alias):
                read_config(family, {alias: value})
    for key, values in {**REQUIRED_VALUES, **family.required_values}.items():
        if key not in family.defaults and any(isinstance(value, bool) for value in values):
            with pytest.raises(ConfigError, match=key):
                read_config(family, {key: int(bool(values[-1]))})


def test_config_phimoe_scales_of_cos_and_sin():
    """Phi-3.5-MoE's files have two, for LongRoPE, and class and files give the same number for both."""
    family = FAMILIES["phimoe"]
    rope = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.5] * 8}
    given = small(family) | {"original_max_position_embeddings": 8}
    model = build(family, given | {"rope_scaling": rope | {"short_mscale": 1.25, "long_mscale": 1.25}})
    assert next(model.stack.iter_blocks()).mixer.rotary.scaling.magnitude == 1.25
    for wrong in (
        rope | {"short_mscale": 1.25},
        {"type": "linear", "factor": 2.0, "short_mscale": 1, "long_mscale": 1},
    ):
        with pytest.raises(ConfigError, match="short_mscale = .* one number for both is computed here"):
            build(family, given | {"rope_scaling": wrong})
    with pytest.raises(ConfigError, match="has no key 'short_mscale'"):
        read_config(FAMILIES["phi3"], {"rope_scaling": rope | {"short_mscale": 1.25}})
