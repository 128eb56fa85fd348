"""JetMoE (Shen et al., arXiv:2404.07413): attention whose projections of queries and outputs are experts, which share
keys and values, and a mixture of experts; both are routed by a softmax over the top-k logits, and have a bias."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import TopSoftmaxRouter
from zoo.models.hf import grammar as hf

from . import llama
from .jetmoe_layers import MixtureOfAttention, OutputBias, RoutedMixerBlock


def _build_jetmoe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    experts = config["num_local_experts"]
    top = config["num_experts_per_tok"]
    heads = config["num_key_value_heads"]
    head_dim = config["kv_channels"]
    if heads is None:
        raise hf.ConfigError("num_key_value_heads is null, and each expert has as many heads as there are of keys")
    # a token has the heads of each of its experts, whatever the file says
    config = hf.Config(config, num_attention_heads=top * heads, head_dim=head_dim)
    ffn = partial(hf.make_mixture_factory(config, TopSoftmaxRouter, experts), shared=partial(OutputBias, embed))
    mixer = partial(
        MixtureOfAttention,
        embed,
        heads,
        router=partial(TopSoftmaxRouter, embed, experts, top),
        experts=experts,
        head_dim=head_dim,
        rotary=hf.build_rotary(config),
        out_scale=hf.compute_out_scale(config),
    )
    # rms_norm_eps is only for the final norm
    norm = hf.make_rms_norm_factory(hf.Config(config, rms_norm_eps=1e-6))
    final_norm = hf.make_rms_norm_factory(config)
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, block=RoutedMixerBlock, final_norm=final_norm, key=key)


def _map_jetmoe_names(config: hf.Config) -> hf.NameMap:
    mixer = {
        "kv_proj": hf.fused("key", "value"),
        "experts.input_linear": "experts.query",
        "experts.output_linear": "experts.out",
        "experts.router.layer": "router.scores",
        "experts.bias": "bias",
    }
    mixture = {
        "input_linear": hf.fused("experts.gate", "experts.up"),
        "output_linear": "experts.down",
        "router.layer": "router.scores",
    }
    mixture = {**hf.prefixed("mlp", "mixture_of_experts", mixture), "mlp.bias": "mixture_of_experts.shared.bias"}
    return llama.map_llama_layers(mixture, hf.prefixed("self_attention", "mixture_of_attention", mixer))


JETMOE = hf.Family(
    name="jetmoe",
    architecture="JetMoeForCausalLM",
    build=_build_jetmoe,
    names=_map_jetmoe_names,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 12,
        "num_key_value_heads": hf.optional_count(16),
        "kv_channels": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0},
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"activation_function": "hidden_act", "head_dim": "kv_channels"},
    ignored_keys=frozenset({"num_attention_heads", "aux_loss_coef"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
