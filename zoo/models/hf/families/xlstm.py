"""xLSTM 7B (Beck et al., arXiv:2503.13427): mLSTM with capped gates, a gated MLP, and soft-capped logits. Checkpoints
have no sLSTM."""

import math
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import MLSTM
from zoo.models.hf import grammar as hf


def _build_xlstm(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    config = hf.Config(config, hidden_act="silu")
    heads = config["num_heads"]
    sizes = {part: int(config["hidden_size"] * config[f"{part}_dim_factor"]) for part in ("qk", "v")}
    for part, size in sizes.items():
        if size % heads:
            raise hf.ConfigError(
                f"{part}_dim_factor makes {size} features, which do not divide evenly over {heads} heads"
            )
    mixer = partial(
        MLSTM,
        config["hidden_size"],
        heads,
        key_dim=sizes["qk"] // heads,
        value_dim=sizes["v"] // heads,
        gate_cap=config["gate_soft_cap"],
        epsilon=config["rms_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )
    unit = config["ffn_round_up_to_multiple_of"]
    width = math.ceil(config["hidden_size"] * config["ffn_proj_factor"] / unit) * unit
    layers = [(mixer, hf.make_gated_mlp_factory(config, width=width))] * config["num_hidden_layers"]
    norm = hf.make_rms_norm_factory(config)
    return hf.build_config_decoder(config, layers, norm, soft_cap=config["output_logit_soft_cap"], key=key)


def _map_xlstm_names(config: hf.Config) -> hf.NameMap:
    if config["weight_mode"] == "fused":
        mixer = {
            "qkv_opreact": hf.fused("projections.query", "projections.key", "projections.value", "readout.gate"),
            "ifgate_preact": hf.fused("input_gate", "forget_gate"),
        }
        ffn = {"proj_up_gate_z": hf.fused("gate", "up"), "proj_down": "down"}
    else:
        mixer = {
            "q": "projections.query",
            "k": "projections.key",
            "v": "projections.value",
            "ogate_preact": "readout.gate",
            "igate_preact": "input_gate",
            "fgate_preact": "forget_gate",
        }
        ffn = {"proj_up_gate": "gate", "proj_up": "up", "proj_down": "down"}
    mixer |= {"multihead_norm": "readout.norm", "out_proj": "readout.out"}
    block = {
        "norm_mlstm": "mixer_norm",
        "norm_ffn": "ffn_norm",
        **hf.prefixed("mlstm_layer", "mlstm", mixer),
        **hf.prefixed("ffn", "gated_mlp", ffn),
    }
    shell = {"embeddings": "embedding", "out_norm": "norm", **hf.prefixed("blocks.*", "layers.*", block)}
    return {**hf.prefixed("backbone", "", shell), "lm_head": "head"}


_WEIGHT_MODE = hf.ValueKind("single or fused", lambda value: value in ("single", "fused"))

XLSTM = hf.Family(
    name="xlstm",
    architecture="xLSTMForCausalLM",
    build=_build_xlstm,
    names=_map_xlstm_names,
    defaults={
        "vocab_size": 50304,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_heads": 8,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "qk_dim_factor": hf.Default(0.5, hf.POSITIVE_NUMBER),
        "v_dim_factor": hf.Default(1.0, hf.POSITIVE_NUMBER),
        "ffn_proj_factor": hf.Default(2.667, hf.POSITIVE_NUMBER),
        "ffn_round_up_to_multiple_of": 64,
        "gate_soft_cap": hf.Default(15.0, hf.POSITIVE_NUMBER),
        "output_logit_soft_cap": hf.Default(30.0, hf.POSITIVE_NUMBER),
        "weight_mode": hf.Default("single", _WEIGHT_MODE),
    },
    aliases={"embedding_dim": "hidden_size", "num_blocks": "num_hidden_layers", "norm_eps": "rms_norm_eps"},
    required_values={
        "use_bias": (False,),
        "add_out_norm": (True,),  # the class has this norm whatever the config says
        "eps": (1e-6,),
        "tie_word_embeddings": (False,),
        "rms_norm_eps": (None,),  # transformers does not read this key
    },
    ignored_keys=frozenset(  # kernels, and the dtypes of their states
        """
        chunkwise_kernel sequence_kernel step_kernel mode chunk_size return_last_states autocast_kernel_dtype
        inference_state_dtype max_inference_chunksize norm_reduction_force_float32
        """.split()
    ),
    embedding="backbone.embeddings",
)
