"""Gemma 2 (Gemma team, arXiv:2408.00118): Gemma's layer with norms before and after each sublayer, soft caps of
attention scores and logits, and a sliding window in every other layer."""

from collections.abc import Callable, Sequence

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import gemma, llama


def build_gemma2(
    config: hf.Config, *, block: Callable[..., hf.AbstractBlock] | None = None, key: Key[Array, ""]
) -> hf.Decoder:
    """Build the model of a Gemma 2 config, with norms before and after each sublayer unless `block` is given."""
    mixers = hf.make_windowed_attention_factories(config, read_windows(config), **read_score_options(config))
    return build_sandwich_decoder(config, mixers, block=block, key=key)


def read_windows(config: hf.Config) -> list[int | None]:
    """Return the sliding window of each layer, None for full attention."""
    types = hf.read_layer_types(config, hf.list_patterned_types(hf.Config(config, sliding_window_pattern=2)))
    return hf.list_layer_windows(types, config["sliding_window"])


def read_score_options(config: hf.Config) -> dict:
    """Return the options of attention that a Gemma config has: biases, the scale of scores, and their soft cap."""
    options = dict.fromkeys(("bias", "out_bias"), config["attention_bias"])
    scale = config["query_pre_attn_scalar"] ** -0.5
    soft_cap = config["attn_logit_softcapping"]
    return {**options, "scale": scale, "soft_cap": soft_cap}


def build_sandwich_decoder(
    config: hf.Config,
    mixers: Sequence[hf.MixerFactory],
    *,
    block: Callable[..., hf.AbstractBlock] | None = None,
    key: Key[Array, ""],
) -> hf.Decoder:
    """Build Gemma's layers with these mixers, and norms before and after each sublayer unless `block` is given."""
    norm = hf.make_rms_norm_factory(config, offset=1.0)
    ffn = hf.make_gated_mlp_factory(config)
    layers = [(mixer, ffn) for mixer in mixers]
    if block is None:
        block = hf.make_sandwich_block(norm)
    options = {"multiplier": config["hidden_size"] ** 0.5, "soft_cap": config["final_logit_softcapping"]}
    return hf.build_config_decoder(config, layers, norm, block=block, key=key, **options)


NORM_NAMES: hf.NameMap = {
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mixer_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}
"""Norms before and after each sublayer."""


def map_gemma2_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of LLaMA-like models with norms before and after each sublayer."""
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), norms=NORM_NAMES)


DEFAULTS = {
    **gemma.DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": hf.optional_count(4),
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": hf.optional_number(50.0),
    "final_logit_softcapping": hf.optional_number(30.0),
    "sliding_window": hf.optional_non_negative(4096),
    "layer_types": hf.optional_words(),
}

GEMMA2 = hf.Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    build=build_gemma2,
    names=map_gemma2_names,
    defaults=DEFAULTS,
    aliases={"hidden_activation": "hidden_act"},
    required_values={"hidden_act": (None, "gelu_pytorch_tanh")},
    ignored_keys=frozenset({"sliding_window_size"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
