"""StarCoder2 (Lozhkov et al., arXiv:2402.19173): grouped-query attention with RoPE and a sliding window, LayerNorm,
MLPs without a gate, biases everywhere."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_starcoder2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["use_bias"]
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias, window=config["sliding_window"])
    layers = [(mixer, hf.make_mlp_factory(config, bias=bias))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_layer_norm_factory(config), key=key)


def _map_starcoder2_names(config: hf.Config) -> hf.NameMap:
    return llama.map_llama_layers(hf.prefixed("mlp", "mlp", {"c_fc": "up", "c_proj": "down"}))


STARCODER2 = hf.Family(
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
        "num_key_value_heads": hf.optional_count(2),
        "head_dim": hf.optional_count(),
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0},
        "sliding_window": hf.optional_non_negative(),
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    aliases={"norm_epsilon": "layer_norm_eps"},
    ignored_keys=frozenset({"residual_dropout", "embedding_dropout"}),
    required_values={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
