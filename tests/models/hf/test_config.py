"""Every config key is honored, refused by name, or known to change nothing, in every spelling and family."""

import itertools

import pytest

from zoo.models.hf.config import IGNORED_KEYS, REQUIRED_VALUES, read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES
from zoo.models.parameter_paths import find_differences

from .configs import (
    CONTEXTS,
    EACH,
    EACH_AT_LENGTH,
    HAS_ROPE_BY_TYPE,
    RELATIVE,
    alias_of,
    build,
    build_or_error,
    other_value,
    small,
)


@pytest.mark.one_case
@EACH_AT_LENGTH
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
    changed = build_or_error(family, given | {alias: other_value(key, default, given.get(alias))})
    if isinstance(changed, str):
        assert alias in changed or key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim")
        return True
    return differs(changed, build(family, given)) or key in ONLY_NAMES


def differs(model, other):
    """Compare two models, and the tokens that their targets begin with."""
    starts = [getattr(x, "start", None) for x in (model, other)]
    return starts[0] != starts[1] or any(find_differences(model, other))


ONLY_NAMES = ("legacy", "weight_mode", "fuse_norm", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
"""Keys that change the names of tensors, or the layers of predictors, which only tensors bring."""


READ_BY_SOME = {
    *("architectures", "id2label", "num_labels", "pad_token_id", "eos_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id"),
}
"""Keys that some families read, and that change nothing in others."""


@EACH
def test_config_defaults_are_those_of_an_empty_file(family):
    config = read_config(family, {})
    assert {key: config[key] for key in family.defaults if key != "rope_parameters"} == {
        key: value for key, value in family.defaults.items() if key != "rope_parameters"
    }
    named = read_config(family, {"model_type": family.name, "architectures": [family.architecture]})
    assert named == config | ({"architectures": [family.architecture]} if "architectures" in family.defaults else {})
    if family in HAS_ROPE_BY_TYPE or family.name == "deepseek_v4":
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
    expected = ["no_such_thing = 1", "nor_this = 2", "vocab_size = '3'"]
    if "vocab_size" in family.ignored_keys:
        expected.pop()
    assert all(word in str(raised.value) for word in expected)


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
    read = family.defaults.keys() | family.required_values.keys() | family.aliases.keys()
    for key in (IGNORED_KEYS | family.ignored_keys) - read:
        assert read_config(family, {key: "anything"}) == read_config(family, {})


@pytest.mark.parametrize(
    ("name", "key", "value"), [("gemma3_text", "attn_logit_softcapping", 0.5), ("lara_mini", "intermediate_size", 24)]
)
def test_config_keys_that_transformers_takes_and_does_not_read(name, key, value):
    family = FAMILIES[name]
    assert read_config(family, {key: value}) == read_config(family, {})
    assert all(
        getattr(block.mixer, "soft_cap", None) is None for block in build(family, small(family)).stack.iter_blocks()
    )


def test_config_ignored_keys_keep_their_defaults():
    llama = FAMILIES["llama"]
    for key, value in (("rms_norm_eps", "x"), ("vocab_size", 7), ("rope_scaling", {"type": "su"}), ("rope_theta", 5.0)):
        assert read_config(llama, {key: value}, ignore=(key,)) == read_config(llama, {})
    gpt2 = FAMILIES["gpt2"]
    assert read_config(gpt2, {"n_embd": 7}, ignore=("n_embd",)) == read_config(gpt2, {})


DEFAULTS_DO_NOT_FIT = {
    ("qwen3_vl", "vision_config"): "deepstack_visual_indexes are 3, each for a layer of the text, which has 1",
    ("diffusion_gemma", "text_config"): "enable_moe_block needs num_experts",
    ("qwen2_vl", "num_key_value_heads"): "2 heads do not divide evenly over 32 kv_heads",
    ("qwen2_5_vl", "num_key_value_heads"): "2 heads do not divide evenly over 32 kv_heads",
}
"""Keys of models of images and text whose defaults have other sizes than the small model, with the error."""
NEEDS_KV_HEADS = [(name, "num_key_value_heads") for name in ("jetmoe", "mimo_v2_flash")]


@EACH_AT_LENGTH
def test_config_null_equals_absent(family):
    absent = {"num_key_value_heads", "head_dim", "sliding_window", "rope_parameters", "layer_types", "q_lora_rank"}
    absent |= {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention_value_scale",
        "mamba_d_ssm",
        "hidden_ratio",
        "expand_ratio",
        "num_slots",
        "num_kv_heads",
        "decoder_start_token_id",
        "embedding_size",
        *("text_config", "vision_config", "text_config_dict", "vision_config_dict"),
    }
    # flash-linear-attention, T5 and DeepSeek-V4 derive no head_dim
    if family.defaults.keys() & {"hidden_ratio", "A_floor", "feed_forward_proj", "hc_mult"}:
        absent.remove("head_dim")
    if family.name in ("albert", "electra"):
        absent.remove("embedding_size")
    for key, default in family.defaults.items():
        found = build_or_error(family, small(family) | {alias_of(family, key): None})
        if message := DEFAULTS_DO_NOT_FIT.get((family.name, key)):
            assert message in found
        elif default is None and isinstance(found, str):
            assert found == f"{key} has to be given: the family has no usual value for it"
        elif key == "sliding_window" and isinstance(found, str):
            assert "no sliding_window says how wide" in found or "sliding_window = None should be" in found
        elif key == "q_lora_rank" and isinstance(found, str):
            assert "the indexer reads the latent of queries" in found or "q_lora_rank = None should be" in found
        elif (default is None or key in absent) and (family.name, key) not in NEEDS_KV_HEADS:
            assert not isinstance(found, str), found
        else:
            assert isinstance(found, str) and alias_of(family, key) in found


BEYOND_THE_LAST = (
    *("max_position_embeddings", "sliding_window_pattern", "no_rope_layer_interval", "global_attn_every_n_layers"),
    *("index_topk_freq", "index_skip_topk_offset", "rescale_every", "attn_layer_period", "expert_layer_period"),
    *("hidden_ratio", "original_max_position_embeddings", "num_layers"),
)
"""Keys of which a value larger than the number of tokens or layers is the same as another, or a rounded one."""
MAY_BE_EMPTY = ("rope_parameters", "rope_scaling", "mlp_only_layers", "no_rope_layers", "architectures", "id2label")
NEEDS_ARCHITECTURE = {
    "vit": ["ViTModel"],
    "bert": ["BertForSequenceClassification"],
    "albert": ["AlbertForSequenceClassification"],
}
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


@pytest.mark.one_case
@pytest.mark.parametrize("family, key", list(list_keys()), ids=str)
def test_config_invalid_values_are_refused_or_honored(family, key):
    needed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    needed |= {"interleave_moe_layer_step": 3, "architectures": NEEDS_ARCHITECTURE.get(family.name)}
    needed |= {"no_rope_layers": [1, 0, 1]} if key in NEEDS_NO_ROPE_LAYERS else {}
    needed |= {"mamba_rms_norm": True} if key == "mamba_norm_before_gate" else {}
    needed |= {"intermediate_size": None} if key == "hidden_ratio" else {}
    if family.name == "deberta-v2":
        needed |= RELATIVE | {"architectures": ["DebertaV2ForSequenceClassification"]}
    if "num_kv_shared_layers" in family.defaults:  # some keys count in layers that see all tokens, or that reuse keys
        needed |= {"attention_k_eq_v": True, "num_kv_shared_layers": 1, "enable_moe_block": True}
        needed |= {"num_experts": 4, "top_k_experts": 2}
        needed |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    given = small(family, **needed, topk_method="group_limited_greedy")
    for value in BAD:
        if key in ("num_hidden_layers", "num_decoder_layers", "decoder_layers") and value == 2**31:
            continue  # too many layers to build: the loader compares with the number of tensors first
        found = build_or_error(family, given | {alias_of(family, key): value})
        if not isinstance(found, str):
            right = given.get(alias_of(family, key), family.defaults[key])
            absent = not value and key in MAY_BE_EMPTY
            same = value == right or absent or key in (*BEYOND_THE_LAST, *ONLY_NAMES)
            assert same or differs(found, build(family, given)), value


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
PER_LAYER = ("moe_topk", "intermediate_size_by_layer", "layer_rope_theta", "value_dim")


@EACH
def test_config_values_are_read_by_type(family):
    for key, default in family.defaults.items():
        alias = alias_of(family, key)
        for value in WRONG_VALUES[type(default)]:
            if key in PER_LAYER and isinstance(value, list):
                continue  # one number for each layer
            if key in ("lower_bound", "clamp_min") and value == -1:
                continue
            if default is None and "text_config" in family.defaults and family.kinds[key].fits(value):
                continue  # as in the text's config, whose default has a type
            with pytest.raises(ConfigError, match=alias):
                read_config(family, {alias: value})
    for key, values in {**REQUIRED_VALUES, **family.required_values}.items():
        if key not in family.defaults and any(isinstance(value, bool) for value in values):
            with pytest.raises(ConfigError, match=key):
                read_config(family, {key: int(bool(values[-1]))})


@pytest.mark.parametrize("pattern", [0, None])
def test_config_without_windows_needs_no_pattern(pattern):
    """transformers writes EXAONE 4 without windows so."""
    family = FAMILIES["exaone4"]
    given = small(family) | {"sliding_window": None, "sliding_window_pattern": pattern}
    model = build(family, given)
    assert [block.mixer.window for block in model.stack.iter_blocks()] == [None] * given["num_hidden_layers"]
    with pytest.raises(ConfigError, match=f"sliding_window_pattern = {pattern} should be a whole number above 0"):
        read_config(family, given | {"sliding_window": 4})
    with pytest.raises(ConfigError, match=f"^_sliding_window_pattern = {pattern} should be a whole number above 0"):
        read_config(FAMILIES["cohere2"], {"_sliding_window_pattern": pattern})


def test_config_suggests_to_ignore_only_what_can_be_ignored():
    """Ignored, a key that the family reads would have its default: another model."""
    for given in ({"vocab_size": "3"}, {"rope_parameters": {"rope_type": "linear", "factor": 0}}):
        with pytest.raises(ConfigError) as raised:
            read_config(FAMILIES["llama"], given)
        assert "ignore=" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("n_layers", "; did you mean 'num_hidden_layers'?"), ("dim", "; did you mean 'hidden_size'?"), ("use_x", ".")],
)
def test_config_suggests_synonyms_and_nothing_far(key, suggestion):
    with pytest.raises(ConfigError) as raised:
        read_config(FAMILIES["llama"], {key: 7})
    assert str(raised.value) == (
        f"{key} = 7 is not a key of llama that we know{suggestion} A key that changes no result of yours may be "
        'ignored: ignore=("key",)'
    )
