"""Hunyuan's dense models (Tencent, "Hunyuan-7B", 2025): LLaMA's layer with a QK norm after RoPE."""

from jaxtyping import Array, Key

from zoo.layers import PostRotaryAttention
from zoo.models.hf import grammar as hf

from . import llama


def _build_hunyuan_v1_dense(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    layers = [(make_hunyuan_mixer(config), hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def make_hunyuan_mixer(config: hf.Config) -> hf.MixerFactory:
    """Return a factory of attention with a QK norm after RoPE. The rope_type "dynamic" with an `alpha` is a fixed base,
    rope_theta * alpha ** (head_dim / (head_dim - 2))."""
    rope = config["rope_parameters"]
    head_dim = hf.read_head_sizes(config)[2]
    bias = config["attention_bias"]
    if rope["rope_type"] == "dynamic" and rope.get("alpha") is not None:
        base = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        config = hf.Config(config, rope_parameters={"rope_type": "default", "rope_theta": base})
    options = {"qk_norm": hf.make_head_norm_factory(config), "rotary": hf.build_rotary(config)}
    return hf.make_attention_factory(config, attention=PostRotaryAttention, bias=bias, out_bias=bias, **options)


def map_hunyuan_layers(feed_forward: hf.NameMap) -> hf.NameMap:
    """Return the name map of Hunyuan's models, given the name map of the feed-forward layers."""
    attention = {
        **hf.omit(llama.ATTENTION_NAMES, "q_norm", "k_norm"),
        "query_layernorm": "query_norm",
        "key_layernorm": "key_norm",
    }
    return llama.map_llama_layers(feed_forward, hf.prefixed("self_attn", "post_rotary_attention", attention))


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "mlp_bias"),
    "vocab_size": 290943,
    "rms_norm_eps": 1e-5,
}
REQUIRED_VALUES = {
    "use_qk_norm": (True,),
    "norm_type": ("rms",),
    **dict.fromkeys(("use_cla", "use_mla", "mlp_bias", "position_embedding_xdrope"), (False,)),
}
IGNORED_KEYS = frozenset({"eod_token_id", "attention_head_dim"})
ROPE_KEYS = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys of "dynamic" RoPE in files; only `alpha` changes it."""

HUNYUAN_V1_DENSE = hf.Family(
    name="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    build=_build_hunyuan_v1_dense,
    names=lambda config: map_hunyuan_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES)),
    defaults=DEFAULTS,
    required_values=REQUIRED_VALUES,
    ignored_keys=IGNORED_KEYS,
    ignored_tensors=llama.LLAMA.ignored_tensors,
    rope_keys=ROPE_KEYS,
)
