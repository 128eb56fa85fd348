"""GPT-OSS (OpenAI, arXiv:2508.10925): experts of a clamped SwiGLU, sinks in the softmax of attention, a window in every
other layer, biases everywhere. On hubs its experts are packed as MXFP4."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import ClampedGatedMLP, Linear, PackedLinear, TopSoftmaxRouter
from zoo.models.assemble import kinds_of, layer
from zoo.models.blocks import Block
from zoo.models.config import ConfigError
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, fused, under
from zoo.models.pieces import attention, decoder, layer_types, mixture, out_scale, rms_norm, windows
from zoo.models.stack import Kind
from zoo.ops.mxfp4 import BLOCK

from . import llama


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, bias = rms_norm(config), config["attention_bias"]
    packed = config["quantization_config"] is not None
    for size in ("hidden_size", "intermediate_size"):
        if packed and config[size] % BLOCK:
            raise ConfigError(f"quantization_config: {size} = {config[size]} is no multiple of {BLOCK}, as MXFP4 needs")
    expert = partial(
        ClampedGatedMLP,
        config["hidden_size"],
        config["intermediate_size"],
        alpha=config["swiglu_alpha"],
        limit=config["swiglu_limit"],
        linear=PackedLinear if packed else Linear,
        out_scale=out_scale(config),
    )
    experts = mixture(config, partial(TopSoftmaxRouter, bias=True), config["num_experts"], expert=expert)

    def kind(window: int | None) -> Kind:
        mixer = attention(config, window=window, bias=bias, out_bias=bias, sinks=True)
        return layer(Block, norm=norm, mixer=mixer, ffn=experts)

    usual = [("full_attention" if number % 2 else "sliding_attention") for number in range(config["num_hidden_layers"])]
    seen = windows(layer_types(config, usual), config["sliding_window"])
    return decoder(config, kinds_of(seen, kind), norm, key=key)


def names(config: Config) -> Table:
    interleaved = partial(fused, groups=config["intermediate_size"])
    experts: Table = {
        "gate_up_proj": interleaved("gate.weight", "up.weight", transposed=True),
        "down_proj": fused("down.weight", transposed=True),
    }
    packed: Table = {
        **{f"gate_up_proj_{part}": interleaved(f"gate.{part}", f"up.{part}") for part in ("blocks", "scales")},
        **{f"down_proj_{part}": f"down.{part}" for part in ("blocks", "scales")},
    }
    experts = {
        **(experts if config["quantization_config"] is None else packed),
        "gate_up_proj_bias": interleaved("gate.bias", "up.bias"),
        "down_proj_bias": "down.bias",
    }
    attention = under("self_attn", "attention", {**llama.PROJECTIONS, "sinks": "sinks"})
    mixture = {"router": "router.scores", **under("experts", "experts.*", experts)}
    return llama.named(under("mlp", "mixture_of_experts", mixture), attention)


GPT_OSS = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    build=build,
    names=names,
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
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
        "sliding_window": 128,
        "layer_types": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "quantization_config": None,
    },
    aliases={"num_local_experts": "num_experts"},
    inert=frozenset({"hidden_act", "initial_context_length", "experts_per_token"}),  # transformers reads none of them
    ignored=llama.LLAMA.ignored,
)
