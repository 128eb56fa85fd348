"""GPT-OSS (OpenAI, arXiv:2508.10925): mixture of experts with a clamped SwiGLU, attention sinks, a sliding window in
every other layer, biases everywhere. On the hub its experts are quantized to MXFP4."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import Linear, TopSoftmaxRouter
from zoo.layers.quantized.linear import MXFP4Linear
from zoo.models.hf import grammar as hf
from zoo.ops.quantized.mxfp4 import BLOCK_SIZE

from . import llama
from .gpt_oss_layers import ClampedGatedMLP


def _build_gpt_oss(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    bias = config["attention_bias"]
    packed = config["quantization_config"] is not None
    for size in ("hidden_size", "intermediate_size"):
        if packed and config[size] % BLOCK_SIZE:
            raise hf.ConfigError(
                f"quantization_config: {size} = {config[size]} is not a multiple of {BLOCK_SIZE}, as MXFP4 needs"
            )
    expert = partial(
        ClampedGatedMLP,
        config["hidden_size"],
        config["intermediate_size"],
        alpha=config["swiglu_alpha"],
        limit=config["swiglu_limit"],
        linear=MXFP4Linear if packed else Linear,
        out_scale=hf.compute_out_scale(config),
    )
    experts = hf.make_mixture_factory(
        config, partial(TopSoftmaxRouter, bias=True), config["num_experts"], expert=expert
    )

    default = ["full_attention" if number % 2 else "sliding_attention" for number in range(config["num_hidden_layers"])]
    windows = hf.list_layer_windows(hf.read_layer_types(config, default), config["sliding_window"])
    mixers = hf.make_windowed_attention_factories(config, windows, bias=bias, out_bias=bias, sinks=True)
    return hf.build_config_decoder(config, [(mixer, experts) for mixer in mixers], norm, key=key)


def _map_gpt_oss_names(config: hf.Config) -> hf.NameMap:
    interleaved = partial(hf.fused, groups=config["intermediate_size"])
    experts: hf.NameMap = {
        "gate_up_proj": interleaved("gate.weight", "up.weight", transposed=True),
        "down_proj": hf.fused("down.weight", transposed=True),
    }
    packed: hf.NameMap = {
        **{f"gate_up_proj_{part}": interleaved(f"gate.{part}", f"up.{part}") for part in ("blocks", "scales")},
        **{f"down_proj_{part}": f"down.{part}" for part in ("blocks", "scales")},
    }
    experts = {
        **(experts if config["quantization_config"] is None else packed),
        "gate_up_proj_bias": interleaved("gate.bias", "up.bias"),
        "down_proj_bias": "down.bias",
    }
    attention = hf.prefixed("self_attn", "attention", {**llama.ATTENTION_NAMES, "sinks": "sinks"})
    mixture = {"router": "router.scores", **hf.prefixed("experts", "experts.*", experts)}
    return llama.map_llama_layers(hf.prefixed("mlp", "mixture_of_experts", mixture), attention)


GPT_OSS = hf.Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    build=_build_gpt_oss,
    names=_map_gpt_oss_names,
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(64),
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_theta": 150000.0,
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "attention_bias": True,
        "sliding_window": hf.optional_non_negative(128),
        "layer_types": hf.optional_words(),
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "quantization_config": hf.Default(None, hf.MXFP4),
    },
    aliases={"num_local_experts": "num_experts"},
    ignored_keys=frozenset(
        {"hidden_act", "initial_context_length", "experts_per_token"}
    ),  # transformers does not read them
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
