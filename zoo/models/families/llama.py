"""LLaMA 1 to 3 (Touvron et al., arXiv:2302.13971; Llama team, arXiv:2407.21783), and the many that have its shape."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.assemble import layer
from zoo.models.blocks import Block
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, fused, under
from zoo.models.pieces import attention, decoder, gated_mlp, rms_norm

from .describe import described

PROJECTIONS: Table = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
}
GATED: Table = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
TOGETHER: Table = {"gate_up_proj": fused("gate.weight", "up.weight"), "down_proj": "down.weight"}
"""All experts of a layer, as transformers holds them in memory."""


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, bias = rms_norm(config), config["attention_bias"]
    mixer = attention(config, bias=bias, out_bias=bias)
    block = layer(Block, norm=norm, mixer=mixer, ffn=gated_mlp(config, bias=config["mlp_bias"]))
    return decoder(config, [block] * config["num_hidden_layers"], norm, key=key)


def names(config: Config) -> Table:
    return named(under("mlp", "gated_mlp", GATED))


def named(feed_forward: Table, mixer: Table | None = None) -> Table:
    """LLaMA's names around those of a feed-forward part; and of a `mixer`, its own unless given."""
    block = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
        **(under("self_attn", "attention", PROJECTIONS) if mixer is None else mixer),
        **feed_forward,
    }
    shell = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    return {**shell, **under("model.layers.*", "layers.*", block)}


DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
}

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    build=build,
    names=names,
    defaults=DEFAULTS,
    ignored=(r"\.rotary_emb\.inv_freq$",),
    describe=described,
)
