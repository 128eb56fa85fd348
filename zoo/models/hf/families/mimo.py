"""MiMo (Xiaomi, arXiv:2505.07608): Qwen2's layers, and a module of multi-token prediction that reads the hidden states
before the embedding."""

from typing import Any

from zoo.models.hf import grammar as hf

from . import llama, qwen2


def _name_mimo_predictor(config: hf.Config, number: int) -> dict[str, str]:
    module = f"model.mtp_layers.{number}"
    return {
        module: "layers.0",
        f"{module}.token_layernorm": "embedding_norm",
        f"{module}.hidden_layernorm": "state_norm",
        f"{module}.input_proj": "projection",
        f"{module}.final_layernorm": "norm",
    }


def _take_first_layer(config: hf.Config) -> dict[str, Any]:
    return {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


MIMO = hf.Family(
    name="mimo",
    architecture="MiMoForCausalLM",
    build=qwen2.QWEN2.build,
    names=llama.map_llama_names,
    defaults={
        **qwen2.QWEN2.declared,
        "vocab_size": 151680,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "rope_parameters": {"rope_theta": 640000.0},
    },
    required_values={"attention_bias": (True,), "use_mrope": (False,)},
    ignored_keys=frozenset({"num_nextn_predict_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^model\.mtp_layers\.",),
    predictors=hf.PredictorFacts(_name_mimo_predictor, _take_first_layer, state_first=True),
)
