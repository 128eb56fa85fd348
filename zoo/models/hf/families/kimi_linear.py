"""Kimi Linear (Kimi team, arXiv:2510.26692): of four layers three with Kimi Delta Attention and the fourth with latent
attention without positions; a mixture of experts after dense layers, routed as DeepSeek-V3's."""

from collections.abc import Mapping
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import KimiDeltaAttention
from zoo.models.hf import grammar as hf
from zoo.ops.rotary import ProportionalScaling, Rotary

from . import deepseek_v2, dots1, llama, mixtral


def _build_kimi_linear(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    config = _read_linear_attention(config)
    unturned = Rotary(config["qk_rope_head_dim"], scaling=ProportionalScaling(0))  # rotates no pair of features
    mixers = {
        "linear_attention": partial(
            KimiDeltaAttention,
            config["hidden_size"],
            config["linear_num_heads"],
            key_dim=config["linear_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
            epsilon=config["rms_norm_eps"],
            out_scale=hf.compute_out_scale(config),
        ),
        "full_attention": hf.make_latent_attention_factory(hf.Config(config, head_dim=None), rotary=unturned),
    }
    numbers = range(config["num_hidden_layers"])
    default = hf.list_layer_types((n == 0 or n % 4 != 0 for n in numbers), local="linear_attention")
    chosen = hf.pick_mixers(hf.read_layer_types(config, default), mixers)
    return deepseek_v2.build_latent_decoder(config, hf.make_biased_router_factory(config), mixers=chosen, key=key)


def _read_linear_attention(config: hf.Config) -> hf.Config:
    """Return the config with the sizes and types of layers that Moonshot's files have in `linear_attn_config`.

    **Raises** `ConfigError` unless its lists name each layer once.
    """
    if not config["linear_attn_config"]:
        return config
    given = hf.read_config(_LINEAR_ATTENTION, config["linear_attn_config"], ignore=None)
    attended = given["full_attn_layers"]
    recurrent = given["kda_layers"]
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    sizes = {ours: given[theirs] for theirs, ours in names.items() if given[theirs] is not None}
    config = hf.Config({**config, **sizes})
    if config["layer_types"] is not None or attended is None or recurrent is None:
        return config
    layers = config["num_hidden_layers"]
    if sorted([*attended, *recurrent]) != list(range(1, layers + 1)):
        raise hf.ConfigError(
            f"full_attn_layers and kda_layers of linear_attn_config should name each of the layers 1 to {layers} once"
        )
    types = hf.list_layer_types((n + 1 in recurrent for n in range(layers)), local="linear_attention")
    return hf.Config(config, layer_types=types)


_DELTA_PATH = "corrector.projections"
PROJECTION_NAMES: hf.NameMap = {
    "q_proj": f"{_DELTA_PATH}.query",
    "k_proj": f"{_DELTA_PATH}.key",
    "v_proj": f"{_DELTA_PATH}.value",
    "b_proj": "corrector.rate",
}
CONVOLUTION_NAMES: hf.NameMap = {
    f"{part}_conv1d": hf.fused(f"{_DELTA_PATH}.convolutions.{number}", conv1d_filters=True)
    for number, part in enumerate("qkv")
}
FUSED_CONVOLUTION_NAMES: hf.NameMap = {
    "conv1d": hf.fused(*(f"{_DELTA_PATH}.convolutions.{number}" for number in range(3)), conv1d_filters=True)
}
"""In memory, where one convolution has the queries, keys and values."""
_DELTA_NAMES: hf.NameMap = {
    **PROJECTION_NAMES,
    "g_a_proj": "readout.gate.down",
    "g_b_proj": "readout.gate.up",
    "o_norm": "readout.norm",
    "o_proj": "readout.out",
}
_DECAY_NAMES: hf.NameMap = {
    "f_a_proj": "decay.step.down",
    "f_b_proj": "decay.step.up",
    "dt_bias": "decay.bias",
    "A_log": hf.TensorMapping(("decay.A_log",), leading_ones=2, trailing_ones=1),
}


def _map_kimi_layers(config: hf.Config, delta: hf.NameMap, feed_forward: hf.NameMap) -> hf.NameMap:
    attention = hf.prefixed("", "latent_attention", deepseek_v2.map_latent_names(config))
    recurrent = hf.prefixed("", "kimi_delta_attention", {**_DELTA_NAMES, **delta})
    mixers = hf.prefixed("self_attn", "", hf.either(attention, recurrent))
    dense = hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES)
    return llama.map_llama_layers({**dense, **feed_forward}, mixers)


def _map_kimi_linear_names(config: hf.Config) -> hf.NameMap:
    experts = hf.prefixed("experts.*", "experts.*", mixtral.EXPERT_NAMES)
    mixture = hf.prefixed("block_sparse_moe", "mixture_of_experts", {**dots1.MIXTURE_NAMES, **experts})
    return _map_kimi_layers(config, {**_DECAY_NAMES, **CONVOLUTION_NAMES}, mixture)


def _map_kimi_linear_memory_names(config: hf.Config) -> hf.NameMap:
    delta = {**hf.prefixed("forget_gate", "", _DECAY_NAMES), **FUSED_CONVOLUTION_NAMES}
    mixture = {**dots1.MIXTURE_NAMES, **deepseek_v2.MEMORY_EXPERT_NAMES}
    return _map_kimi_layers(config, delta, hf.prefixed("mlp", "mixture_of_experts", mixture))


_LINEAR_ATTENTION = hf.Family(
    name="kimi_linear's linear_attn_config",
    architecture="",
    build=_build_kimi_linear,
    names=_map_kimi_linear_names,
    defaults={
        "head_dim": hf.optional_count(),
        "num_heads": hf.optional_count(),
        "short_conv_kernel_size": hf.optional_count(),
        "full_attn_layers": hf.optional_layer_numbers(),
        "kda_layers": hf.optional_layer_numbers(),
    },
)
"""The table `linear_attn_config`, read as a config of its own."""

DEFAULTS = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": hf.optional_count(32),
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": hf.optional_count(),
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "layer_types": hf.optional_words(),
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "linear_attn_config": hf.Default({}, hf.ValueKind("a table", lambda value: isinstance(value, Mapping))),
    "mlp_layer_types": hf.optional_words(),
    "first_k_dense_replace": hf.non_negative(1),
    "moe_intermediate_size": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": hf.Default(2.446, hf.POSITIVE_NUMBER),
}

KIMI_LINEAR = hf.Family(
    name="kimi_linear",
    architecture="KimiLinearForCausalLM",
    build=_build_kimi_linear,
    names=_map_kimi_linear_names,
    defaults=DEFAULTS,
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
    },
    required_values={
        "hidden_act": ("silu",),
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "moe_layer_freq": (1,),
        "num_nextn_predict_layers": (0, None),
    },
    # without positions there is no RoPE, and nothing depends on the length; groups are chosen where there are several
    ignored_keys=frozenset(
        """
        head_dim qk_head_dim rope_theta rope_scaling rope_parameters max_position_embeddings use_grouped_topk
        """.split()
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_kimi_linear_memory_names,
    older_endings={  # transformers 5 writes dense layers under the name of the mixtures
        f".block_sparse_moe.{name}.weight": f".mlp.{name}.weight" for name in llama.GATED_MLP_NAMES
    },
)
