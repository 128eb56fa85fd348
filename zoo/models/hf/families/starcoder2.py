"""StarCoder2 (Lozhkov et al., arXiv:2402.19173): grouped-query attention with RoPE and a sliding window, LayerNorm,
MLPs without a gate, biases everywhere."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_attention_factory,
    make_layer_norm_factory,
    make_mlp_factory,
)
from zoo.models.hf.kinds import optional_count, optional_non_negative
from zoo.models.hf.spec import Config, Family, NameMap, prefixed

from . import llama


def _build_starcoder2(config: Config, *, key: Key[Array, ""]) -> Decoder:
    bias = config["use_bias"]
    mixer = make_attention_factory(config, bias=bias, out_bias=bias, window=config["sliding_window"])
    layers = [(mixer, make_mlp_factory(config, bias=bias))] * config["num_hidden_layers"]
    return build_config_decoder(config, layers, make_layer_norm_factory(config), key=key)


def _map_starcoder2_names(config: Config) -> NameMap:
    return llama.map_llama_layers(prefixed("mlp", "mlp", {"c_fc": "up", "c_proj": "down"}))


STARCODER2 = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    build=_build_starcoder2,
    names=_map_starcoder2_names,
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": optional_count(2),
        "head_dim": optional_count(),
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
        "sliding_window": optional_non_negative(),
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    aliases={"norm_epsilon": "layer_norm_eps"},
    ignored_keys=frozenset({"residual_dropout", "embedding_dropout"}),
    required_values={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
