"""EXAONE 3.0 and 3.5 (LG AI Research, arXiv:2408.03541; arXiv:2412.04862): LLaMA's layer under names of its own."""

from zoo.models.hf import grammar as hf

from . import llama


def _map_exaone_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files. In memory, transformers has LLaMA's names."""
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    block = {
        "ln_1": "mixer_norm",
        "ln_2": "ffn_norm",
        **hf.prefixed("attn.attention", "attention", attention),
        **hf.prefixed("mlp", "gated_mlp", {"c_fc_0": "gate", "c_fc_1": "up", "c_proj": "down"}),
    }
    shell = {"transformer.wte": "embedding", "transformer.ln_f": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("transformer.h.*", "layers.*", block)}


EXAONE = hf.Family(
    name="exaone",
    architecture="LlamaForCausalLM",
    build=llama.build_llama,
    names=_map_exaone_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 102400,
        "intermediate_size": 14336,
        "num_key_value_heads": hf.optional_count(8),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0},
    },
    aliases={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    ignored_keys=frozenset({"embed_dropout"}),
    ignored_tensors=(r"\.rotary\.inv_freq$", *llama.LLAMA.ignored_tensors),
    memory_names=llama.map_llama_names,
    embedding="transformer.wte",
)
