"""Zamba 2 (Glorioso et al., arXiv:2411.15242): Mamba-2 layers, some of which first call one of a few Transformer layers
that they share, each with low-rank updates of its own."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Mamba2
from zoo.models.hf import grammar as hf

from . import zamba
from .mamba2 import MIXER_NAMES
from .zamba_layers import LowRankUpdates, SharedTransformer, SharingBlock


def _build_zamba2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    inner = config["mamba_expand"] * embed
    heads = config["n_mamba_heads"]
    groups = config["mamba_ngroups"]
    if inner % heads or heads % groups:
        raise hf.ConfigError(
            f"mamba_expand * hidden_size = {inner} should divide evenly over n_mamba_heads = {heads}, and these over "
            f"mamba_ngroups = {groups}"
        )
    mixer = partial(
        Mamba2,
        embed,
        heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=config["mamba_d_state"],
        conv_width=config["mamba_d_conv"],
        bias=config["add_bias_linear"],
        epsilon=1e-5,  # of the gated norm, whatever rms_norm_eps says
        dt_limit=(config["time_step_min"], float("inf")),
        out_scale=config["num_hidden_layers"] ** -0.5,
    )
    rotary = None
    if config["use_mem_rope"]:
        rotary = hf.build_rotary(hf.Config(config, head_dim=2 * embed // config["num_attention_heads"]))
    updates = partial(LowRankUpdates, rank=config["adapter_rank"], attention=config["use_shared_attention_adapter"])
    options = {"rotary": rotary, "mlp_bias": config["add_bias_linear"], "blocks": config["num_mem_blocks"]}
    types = _list_layer_types(config)
    return zamba.build_zamba_decoder(config, types, mixer, make_updates=updates, **options, key=key)


def _list_layer_types(config: hf.Config) -> list[str]:
    callers = {*range(6, 43, 6), 47, 51}
    if config["layers_block_type"] is None and config["num_hidden_layers"] != 54:  # the class would make 54
        raise hf.ConfigError("layers_block_type has to be given: the family has no usual value for it")
    default = ["hybrid" if number in callers else "linear_attention" for number in range(54)]
    return zamba.read_layer_types(config, default)


def _map_zamba2_names(config: hf.Config) -> hf.NameMap:
    updates = {
        "feed_forward.gate_up_proj_adapter_list.*.0": "down",
        "feed_forward.gate_up_proj_adapter_list.*.1": hf.fused("gate", "up"),
    }
    if config["use_shared_attention_adapter"]:
        for ours, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            layers = {"0": f"{ours}.down", "1": f"{ours}.up"}
            updates |= hf.prefixed(f"self_attn.linear_{letter}_adapter_list.*", "", layers)
    shared = {
        **zamba.SHARED_NAMES,
        "feed_forward.gate_up_proj": hf.fused("gated_mlp.gate", "gated_mlp.up"),
        "feed_forward.down_proj": "gated_mlp.down",
        **hf.prefixed("", "updates.*", updates),
    }
    mixer = hf.prefixed("", "mamba2", MIXER_NAMES)
    types = _list_layer_types(config)
    return zamba.map_zamba_names(types, mixer, shared, "shared_transformer", config["num_mem_blocks"])


def _map_zamba2_callers(config: hf.Config) -> Mapping[str, str]:
    return zamba.map_callers(_list_layer_types(config), "shared_transformer", config["num_mem_blocks"])


def _describe_zamba2(model: Any) -> dict[str, Any]:
    """Return the config of a Zamba 2, read off the first layer that calls a shared one.

    **Raises** `ConfigError` for a model without such a layer, and for other classes of layers.
    """
    model, blocks = hf.eval_shape_blocks(model)
    for block in blocks:
        hf.check_type("block", block, SharingBlock if isinstance(block, SharingBlock) else hf.MixerBlock)
    types = ["hybrid" if isinstance(block, SharingBlock) else "linear_attention" for block in blocks]
    if "hybrid" not in types:
        raise hf.ConfigError("none of its layers calls a shared one")
    first = blocks[types.index("hybrid")]
    shared = first.shared
    hf.check_type("shared layer", shared, SharedTransformer)
    hf.check_type("updates", first.updates, LowRankUpdates)
    hf.check_type("mixer", first.layer.mixer, Mamba2)
    mixer = first.layer.mixer
    attention = shared.mixer
    vocab, embed = model.embedding.table_shape
    heads = mixer.dt.out_size
    config = {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": shared.ffn.gate.out_size,
        "hidden_act": hf.find_activation_name(shared.ffn.activation),
        "num_hidden_layers": len(blocks),
        "layers_block_type": types,
        "num_mem_blocks": len(model.stack.shared),
        "num_attention_heads": attention.query.out_size // attention.head_dim,
        "num_key_value_heads": attention.key.out_size // attention.head_dim,
        "use_mem_rope": attention.rotary is not None,
        "use_shared_attention_adapter": first.updates.query is not None,
        "adapter_rank": first.updates.down.out_size,
        "n_mamba_heads": heads,
        "mamba_ngroups": mixer.B.out_size // mixer.state_dim,
        "mamba_d_state": mixer.state_dim,
        "mamba_d_conv": mixer.x_convolution.width,
        "mamba_expand": heads * mixer.head_dim // embed,
        "time_step_min": mixer.dt_limit[0],
        "add_bias_linear": hf.has_bias(mixer.out),
        "rms_norm_eps": first.layer.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
    }
    if attention.rotary is None:
        return config
    return {**config, "rope_parameters": hf.describe_rope_parameters(attention.rotary, attention.head_dim)}


ZAMBA2 = hf.Family(
    name="zamba2",
    architecture="Zamba2ForCausalLM",
    build=_build_zamba2,
    names=_map_zamba2_names,
    defaults={
        **zamba.DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": hf.optional_count(),
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "num_key_value_heads": hf.optional_count(),
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10000.0},
        "use_mem_rope": False,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
        "adapter_rank": 128,
        "n_mamba_heads": 8,
        "mamba_d_state": 64,
        "mamba_ngroups": 1,
        "time_step_min": hf.Default(0.001, hf.NON_NEGATIVE_NUMBER),
        "add_bias_linear": False,
    },
    required_values={
        "use_long_context": (False,),  # another rope_theta
        "use_conv_bias": (True,),  # the class has this bias whatever the config says
        "use_shared_mlp_adapter": (True,),  # so with the updates of MLPs
    },
    ignored_keys=zamba.IGNORED_KEYS
    | {
        # follow from other keys
        *("attention_head_dim", "hybrid_layer_ids", "kv_channels", "mamba_headdim", "num_query_groups"),
        *("chunk_size", "use_mem_eff_path"),  # implementation
    },
    callers=_map_zamba2_callers,
    describe=_describe_zamba2,
)
