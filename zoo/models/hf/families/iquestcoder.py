"""IQuest-Coder (IQuest Lab, "IQuest-Coder-V1", 2026): LLaMA's layer."""

from zoo.models.hf import grammar as hf

from . import llama

IQUESTCODER = hf.Family(
    name="iquestcoder",
    architecture="LlamaForCausalLM",
    build=llama.build_llama,
    names=llama.map_llama_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 76800,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 80,
        "num_attention_heads": 40,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    required_values={"clip_qkv": (None,), "use_sliding_window": (False,)},
    ignored_keys=frozenset({"sliding_window", "max_window_layers"}),  # of use_sliding_window
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
