"""GPT-NeoX (Black et al., arXiv:2204.06745) and Pythia (Biderman et al., arXiv:2304.01373): parallel attention
and feed-forward, RoPE on part of each head; a QKV projection that is fused per head."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf


def _build_gpt_neox(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_layer_norm_factory(config)
    bias = config["attention_bias"]
    block = hf.ParallelBlock if config["use_parallel_residual"] else hf.Block
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias)
    ffn = hf.make_mlp_factory(config)
    return hf.build_config_decoder(config, [(mixer, ffn)] * config["num_hidden_layers"], norm, block=block, key=key)


def _map_gpt_neox_names(config: hf.Config) -> hf.NameMap:
    per_head = hf.fused("query", "key", "value", groups=config["num_attention_heads"])
    block = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
        **hf.prefixed("attention", "attention", {"query_key_value": per_head, "dense": "out"}),
        **hf.prefixed("mlp", "mlp", {"dense_h_to_4h": "up", "dense_4h_to_h": "down"}),
    }
    shell = {"embed_in": "embedding", "final_layer_norm": "norm", **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("gpt_neox", "", shell), "embed_out": "head"}


GPT_NEOX = hf.Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    build=_build_gpt_neox,
    names=_map_gpt_neox_names,
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ignored_tensors=(r"\.attention\.bias$", r"\.attention\.masked_bias$", r"\.rotary_emb\.inv_freq$"),
    required_values={
        "rope_theta": (None,),
        "partial_rotary_factor": (None,),
    },  # transformers reads them in rope_parameters only
    memory_modules={"lm_head": "embed_out"},
    head="embed_out",
    embedding="gpt_neox.embed_in",
)
