"""Models of published sizes, initialized from scratch. A preset is a config.json that its family builds."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Key

from ..decoder import Decoder
from ..hf.config import read_config
from ..hf.errors import ConfigError
from ..hf.rope_config import ROPE_CONFIG_KEYS
from ..hf.spec import Family, Origin


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published model."""

    family: str
    """The `model_type` of its config."""
    source: str
    """Repository on the Hugging Face hub whose config.json it is."""
    parameters: int
    """Published number of parameters."""
    config: Mapping[str, Any]
    """Keys of its config.json that change the result and differ from the defaults of the family."""
    active_parameters: int | None = None
    """Published number of active parameters of a mixture of experts, rounded or truncated."""
    active_excludes_embedding: bool = False
    """True if `active_parameters` leaves out the embedding, which `count_active_parameters` counts in full."""


def _transformer_sizes(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int | None = None) -> dict[str, Any]:
    """Return a row of a table of sizes as config keys."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes if kv_heads is None else sizes | {"num_key_value_heads": kv_heads}


def _gpt2_sizes(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": hidden, "n_layer": layers, "n_head": heads}


def _mixer_sizes(hidden: int, layers: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers}


def _mamba2_sizes(hidden: int, layers: int) -> dict[str, Any]:
    return _TIED | {"hidden_size": hidden, "num_hidden_layers": layers, "num_heads": hidden // 32, **_MAMBA2}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LONG_CONTEXT: dict[str, Any] = {"max_position_embeddings": 131072}
_EPSILON: dict[str, Any] = {"rms_norm_eps": 1e-5}

_LLAMA2 = _EPSILON | {"max_position_embeddings": 4096}
_LLAMA3 = _EPSILON | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA31 = _LLAMA3 | _LONG_CONTEXT | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **_LLAMA3_ROPE}}
_LLAMA32 = _LLAMA3 | _LONG_CONTEXT | _TIED | {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, **_LLAMA3_ROPE}}
_SMOLLM2 = _EPSILON | _TIED | {"vocab_size": 49152, "max_position_embeddings": 8192}
_MISTRAL = _EPSILON | _transformer_sizes(4096, 14336, 32, 32, 8) | {"max_position_embeddings": 32768}
_MISTRAL3 = _MISTRAL | {"vocab_size": 32768, "sliding_window": None, "rope_theta": 1000000.0}
_QWEN = {"rope_theta": 1000000.0}
_QWEN3 = _QWEN | {"max_position_embeddings": 40960}
_QWEN_LARGE_VOCAB = {"vocab_size": 152064}
_PYTHIA = {"vocab_size": 50304}
_GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22}
_GRANITE |= _TIED | {"logits_scaling": 6.0, "vocab_size": 49155, "max_position_embeddings": 4096}
_GLM = {"rope_theta": 1000000.0, "attention_bias": True, "head_dim": 128}
_DEEPSEEK = {"max_position_embeddings": 163840}
_DEEPSEEK_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
_DEEPSEEK2 = _DEEPSEEK | {"rope_scaling": {**_DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
_DEEPSEEK2 |= {"first_k_dense_replace": 1, "num_experts_per_tok": 6}
_MAMBA2 = {"n_groups": 1, "vocab_size": 50288}

PRESETS: dict[str, Preset] = {
    "deepseek-v2": Preset(
        "deepseek_v2",
        "deepseek-ai/DeepSeek-V2",
        235_741_434_880,
        _DEEPSEEK2
        | _transformer_sizes(5120, 12288, 60, 128)
        | {"n_routed_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 16.0}
        | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
        21_000_000_000,
    ),
    "deepseek-v2-lite": Preset(
        "deepseek_v2",
        "deepseek-ai/DeepSeek-V2-Lite",
        15_706_484_224,
        _DEEPSEEK2 | _transformer_sizes(2048, 10944, 27, 16) | {"q_lora_rank": None, "moe_intermediate_size": 1408},
    ),
    "deepseek-v3": Preset(
        "deepseek_v3",
        "deepseek-ai/DeepSeek-V3",
        671_026_404_352,
        _DEEPSEEK
        | _transformer_sizes(7168, 18432, 61, 128, 128)
        | {"rope_scaling": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        37_000_000_000,
    ),
    "dots.llm1": Preset(
        "dots1",
        "rednote-hilab/dots.llm1.base",
        142_774_373_888,
        _EPSILON
        | _transformer_sizes(4096, 10944, 62, 32, 32)
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"max_position_embeddings": 32768, "rope_theta": 10000000.0},
        14_000_000_000,
    ),
    "ernie-4.5-21b-a3b": Preset(
        "ernie4_5_moe",
        "baidu/ERNIE-4.5-21B-A3B-PT",
        21_825_436_160,
        _transformer_sizes(2560, 12288, 28, 20, 4),
        3_000_000_000,
    ),
    "falcon-mamba-7b": Preset(
        "falcon_mamba",
        "tiiuae/falcon-mamba-7b",
        7_272_665_088,
        _mixer_sizes(4096, 64) | {"vocab_size": 65024, "tie_word_embeddings": False},
    ),
    "gemma-2b": Preset("gemma", "google/gemma-2b", 2_506_172_416, _transformer_sizes(2048, 16384, 18, 8, 1)),
    "gemma-7b": Preset("gemma", "google/gemma-7b", 8_537_680_896, _transformer_sizes(3072, 24576, 28, 16, 16)),
    "glm-4.5": Preset(
        "glm4_moe",
        "zai-org/GLM-4.5",
        352_797_814_784,
        _GLM
        | _transformer_sizes(5120, 12288, 92, 96, 8)
        | {"n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3}
        | {"use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "glm-4.5-air": Preset(
        "glm4_moe", "zai-org/GLM-4.5-Air", 106_852_245_504, _GLM | _transformer_sizes(4096, 10944, 46, 96, 8)
    ),
    "gpt-neox-20b": Preset(
        "gpt_neox",
        "EleutherAI/gpt-neox-20b",
        20_554_567_680,
        _transformer_sizes(6144, 24576, 44, 64) | {"hidden_act": "gelu_fast"},
    ),
    "gpt-oss-20b": Preset(
        "gpt_oss",
        "openai/gpt-oss-20b",
        20_914_757_184,
        {"num_hidden_layers": 24, "num_local_experts": 32},
        3_610_000_000,
        active_excludes_embedding=True,
    ),
    "gpt-oss-120b": Preset(
        "gpt_oss", "openai/gpt-oss-120b", 116_829_156_672, {}, 5_130_000_000, active_excludes_embedding=True
    ),
    "gpt2": Preset("gpt2", "openai-community/gpt2", 124_439_808, _gpt2_sizes(768, 12, 12)),
    "gpt2-medium": Preset("gpt2", "openai-community/gpt2-medium", 354_823_168, _gpt2_sizes(1024, 24, 16)),
    "gpt2-large": Preset("gpt2", "openai-community/gpt2-large", 774_030_080, _gpt2_sizes(1280, 36, 20)),
    "gpt2-xl": Preset("gpt2", "openai-community/gpt2-xl", 1_557_611_200, _gpt2_sizes(1600, 48, 25)),
    "granite-3.0-1b-a400m": Preset(
        "granitemoe",
        "ibm-granite/granite-3.0-1b-a400m-base",
        1_334_628_352,
        _GRANITE | _transformer_sizes(1024, 512, 24, 16, 8) | {"num_local_experts": 32, "num_experts_per_tok": 8},
        400_000_000,
    ),
    "granite-3.0-3b-a800m": Preset(
        "granitemoe",
        "ibm-granite/granite-3.0-3b-a800m-base",
        3_298_793_472,
        _GRANITE | _transformer_sizes(1536, 512, 32, 24, 8) | {"num_local_experts": 40, "num_experts_per_tok": 8},
        800_000_000,
    ),
    "llama2-7b": Preset(
        "llama", "meta-llama/Llama-2-7b-hf", 6_738_415_616, _LLAMA2 | _transformer_sizes(4096, 11008, 32, 32)
    ),
    "llama2-13b": Preset(
        "llama", "meta-llama/Llama-2-13b-hf", 13_015_864_320, _LLAMA2 | _transformer_sizes(5120, 13824, 40, 40)
    ),
    "llama2-70b": Preset(
        "llama", "meta-llama/Llama-2-70b-hf", 68_976_648_192, _LLAMA2 | _transformer_sizes(8192, 28672, 80, 64, 8)
    ),
    "llama3-8b": Preset(
        "llama", "meta-llama/Meta-Llama-3-8B", 8_030_261_248, _LLAMA3 | _transformer_sizes(4096, 14336, 32, 32, 8)
    ),
    "llama3-70b": Preset(
        "llama", "meta-llama/Meta-Llama-3-70B", 70_553_706_496, _LLAMA3 | _transformer_sizes(8192, 28672, 80, 64, 8)
    ),
    "llama3.1-8b": Preset(
        "llama", "meta-llama/Llama-3.1-8B", 8_030_261_248, _LLAMA31 | _transformer_sizes(4096, 14336, 32, 32, 8)
    ),
    "llama3.1-70b": Preset(
        "llama", "meta-llama/Llama-3.1-70B", 70_553_706_496, _LLAMA31 | _transformer_sizes(8192, 28672, 80, 64, 8)
    ),
    "llama3.1-405b": Preset(
        "llama", "meta-llama/Llama-3.1-405B", 405_853_388_800, _LLAMA31 | _transformer_sizes(16384, 53248, 126, 128, 8)
    ),
    "llama3.2-1b": Preset(
        "llama",
        "meta-llama/Llama-3.2-1B",
        1_235_814_400,
        _LLAMA32 | _transformer_sizes(2048, 8192, 16, 32, 8) | {"head_dim": 64},
    ),
    "llama3.2-3b": Preset(
        "llama",
        "meta-llama/Llama-3.2-3B",
        3_212_749_824,
        _LLAMA32 | _transformer_sizes(3072, 8192, 28, 24, 8) | {"head_dim": 128},
    ),
    "mamba-codestral-7b": Preset("mamba2", "mistralai/Mamba-Codestral-7B-v0.1", 7_285_403_648, _mixer_sizes(4096, 64)),
    "mamba-130m": Preset("mamba", "state-spaces/mamba-130m-hf", 129_135_360, _mixer_sizes(768, 24)),
    "mamba-370m": Preset("mamba", "state-spaces/mamba-370m-hf", 371_516_416, _mixer_sizes(1024, 48)),
    "mamba-790m": Preset("mamba", "state-spaces/mamba-790m-hf", 793_204_224, _mixer_sizes(1536, 48)),
    "mamba-1.4b": Preset("mamba", "state-spaces/mamba-1.4b-hf", 1_372_178_432, _mixer_sizes(2048, 48)),
    "mamba-2.8b": Preset("mamba", "state-spaces/mamba-2.8b-hf", 2_768_345_600, _mixer_sizes(2560, 64)),
    "mamba2-130m": Preset("mamba2", "AntonV/mamba2-130m-hf", 128_989_632, _mamba2_sizes(768, 24)),
    "mamba2-370m": Preset("mamba2", "AntonV/mamba2-370m-hf", 368_346_624, _mamba2_sizes(1024, 48)),
    "mamba2-780m": Preset("mamba2", "AntonV/mamba2-780m-hf", 780_161_280, _mamba2_sizes(1536, 48)),
    "mamba2-1.3b": Preset("mamba2", "AntonV/mamba2-1.3b-hf", 1_343_757_312, _mamba2_sizes(2048, 48)),
    "mamba2-2.7b": Preset("mamba2", "AntonV/mamba2-2.7b-hf", 2_702_599_680, _mamba2_sizes(2560, 64)),
    "mistral-7b-v0.1": Preset("mistral", "mistralai/Mistral-7B-v0.1", 7_241_732_096, _MISTRAL),
    "mistral-7b-v0.3": Preset("mistral", "mistralai/Mistral-7B-v0.3", 7_248_023_552, _MISTRAL3),
    "mixtral-8x7b": Preset(
        "mixtral",
        "mistralai/Mixtral-8x7B-v0.1",
        46_702_792_704,
        _transformer_sizes(4096, 14336, 32, 32, 8) | {"max_position_embeddings": 32768},
        12_900_000_000,
    ),
    "mixtral-8x22b": Preset(
        "mixtral",
        "mistralai/Mixtral-8x22B-v0.1",
        140_620_634_112,
        _transformer_sizes(6144, 16384, 56, 48, 8) | {"max_position_embeddings": 65536},
        39_000_000_000,
    ),
    "olmoe-1b-7b": Preset(
        "olmoe", "allenai/OLMoE-1B-7B-0924", 6_919_161_856, _transformer_sizes(2048, 1024, 16, 16, 16), 1_300_000_000
    ),
    "pythia-70m": Preset(
        "gpt_neox", "EleutherAI/pythia-70m", 70_426_624, _PYTHIA | _transformer_sizes(512, 2048, 6, 8)
    ),
    "pythia-160m": Preset(
        "gpt_neox", "EleutherAI/pythia-160m", 162_322_944, _PYTHIA | _transformer_sizes(768, 3072, 12, 12)
    ),
    "pythia-410m": Preset(
        "gpt_neox", "EleutherAI/pythia-410m", 405_334_016, _PYTHIA | _transformer_sizes(1024, 4096, 24, 16)
    ),
    "pythia-1b": Preset(
        "gpt_neox", "EleutherAI/pythia-1b", 1_011_781_632, _PYTHIA | _transformer_sizes(2048, 8192, 16, 8)
    ),
    "pythia-1.4b": Preset(
        "gpt_neox", "EleutherAI/pythia-1.4b", 1_414_647_808, _PYTHIA | _transformer_sizes(2048, 8192, 24, 16)
    ),
    "pythia-2.8b": Preset(
        "gpt_neox", "EleutherAI/pythia-2.8b", 2_775_208_960, _PYTHIA | _transformer_sizes(2560, 10240, 32, 32)
    ),
    "pythia-6.9b": Preset("gpt_neox", "EleutherAI/pythia-6.9b", 6_857_302_016, _transformer_sizes(4096, 16384, 32, 32)),
    "pythia-12b": Preset(
        "gpt_neox",
        "EleutherAI/pythia-12b",
        11_846_072_320,
        _transformer_sizes(5120, 20480, 36, 40) | {"vocab_size": 50688},
    ),
    "qwen1.5-moe-a2.7b": Preset(
        "qwen2_moe",
        "Qwen/Qwen1.5-MoE-A2.7B",
        14_315_784_192,
        _QWEN | _transformer_sizes(2048, 5632, 24, 16, 16) | {"max_position_embeddings": 8192},
        2_700_000_000,
    ),
    "qwen2-0.5b": Preset(
        "qwen2",
        "Qwen/Qwen2-0.5B",
        494_032_768,
        _QWEN | _TIED | _LONG_CONTEXT | _transformer_sizes(896, 4864, 24, 14, 2),
    ),
    "qwen2-1.5b": Preset(
        "qwen2",
        "Qwen/Qwen2-1.5B",
        1_543_714_304,
        _QWEN | _TIED | _LONG_CONTEXT | _transformer_sizes(1536, 8960, 28, 12, 2),
    ),
    "qwen2-7b": Preset(
        "qwen2",
        "Qwen/Qwen2-7B",
        7_615_616_512,
        _QWEN | _QWEN_LARGE_VOCAB | _LONG_CONTEXT | _transformer_sizes(3584, 18944, 28, 28, 4),
    ),
    "qwen2-57b-a14b": Preset(
        "qwen2_moe",
        "Qwen/Qwen2-57B-A14B",
        57_408_658_944,
        _QWEN
        | _LONG_CONTEXT
        | _transformer_sizes(3584, 18944, 28, 28, 4)
        | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}
        | {"shared_expert_intermediate_size": 20480},
        14_000_000_000,
    ),
    "qwen2.5-0.5b": Preset(
        "qwen2", "Qwen/Qwen2.5-0.5B", 494_032_768, _QWEN | _TIED | _transformer_sizes(896, 4864, 24, 14, 2)
    ),
    "qwen2.5-1.5b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-1.5B",
        1_543_714_304,
        _QWEN | _TIED | _LONG_CONTEXT | _transformer_sizes(1536, 8960, 28, 12, 2),
    ),
    "qwen2.5-3b": Preset(
        "qwen2", "Qwen/Qwen2.5-3B", 3_085_938_688, _QWEN | _TIED | _transformer_sizes(2048, 11008, 36, 16, 2)
    ),
    "qwen2.5-7b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-7B",
        7_615_616_512,
        _QWEN | _QWEN_LARGE_VOCAB | _LONG_CONTEXT | _transformer_sizes(3584, 18944, 28, 28, 4),
    ),
    "qwen2.5-14b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-14B",
        14_770_033_664,
        _QWEN | _QWEN_LARGE_VOCAB | _LONG_CONTEXT | _EPSILON | _transformer_sizes(5120, 13824, 48, 40, 8),
    ),
    "qwen2.5-32b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-32B",
        32_763_876_352,
        _QWEN | _QWEN_LARGE_VOCAB | _LONG_CONTEXT | _EPSILON | _transformer_sizes(5120, 27648, 64, 40, 8),
    ),
    "qwen2.5-72b": Preset(
        "qwen2",
        "Qwen/Qwen2.5-72B",
        72_706_203_648,
        _QWEN | _QWEN_LARGE_VOCAB | _LONG_CONTEXT | _EPSILON | _transformer_sizes(8192, 29568, 80, 64, 8),
    ),
    "qwen3-0.6b": Preset(
        "qwen3", "Qwen/Qwen3-0.6B", 596_049_920, _QWEN3 | _TIED | _transformer_sizes(1024, 3072, 28, 16, 8)
    ),
    "qwen3-1.7b": Preset(
        "qwen3", "Qwen/Qwen3-1.7B", 1_720_574_976, _QWEN3 | _TIED | _transformer_sizes(2048, 6144, 28, 16, 8)
    ),
    "qwen3-4b": Preset(
        "qwen3", "Qwen/Qwen3-4B", 4_022_468_096, _QWEN3 | _TIED | _transformer_sizes(2560, 9728, 36, 32, 8)
    ),
    "qwen3-8b": Preset("qwen3", "Qwen/Qwen3-8B", 8_190_735_360, _QWEN3 | _transformer_sizes(4096, 12288, 36, 32, 8)),
    "qwen3-14b": Preset("qwen3", "Qwen/Qwen3-14B", 14_768_307_200, _QWEN3 | _transformer_sizes(5120, 17408, 40, 40, 8)),
    "qwen3-32b": Preset("qwen3", "Qwen/Qwen3-32B", 32_762_123_264, _QWEN3 | _transformer_sizes(5120, 25600, 64, 64, 8)),
    "qwen3-30b-a3b": Preset(
        "qwen3_moe",
        "Qwen/Qwen3-30B-A3B",
        30_532_122_624,
        _QWEN3 | _transformer_sizes(2048, 6144, 48, 32, 4) | {"head_dim": 128, "norm_topk_prob": True},
        3_300_000_000,
    ),
    "qwen3-235b-a22b": Preset(
        "qwen3_moe",
        "Qwen/Qwen3-235B-A22B",
        235_093_634_560,
        _QWEN3
        | _transformer_sizes(4096, 12288, 94, 64, 4)
        | {"head_dim": 128, "norm_topk_prob": True, "moe_intermediate_size": 1536},
        22_000_000_000,
    ),
    "rwkv-4-169m": Preset("rwkv", "RWKV/rwkv-4-169m-pile", 169_342_464, _mixer_sizes(768, 12)),
    "rwkv-4-430m": Preset("rwkv", "RWKV/rwkv-4-430m-pile", 430_397_440, _mixer_sizes(1024, 24)),
    "rwkv-4-1b5": Preset("rwkv", "RWKV/rwkv-4-1b5-pile", 1_515_106_304, _mixer_sizes(2048, 24)),
    "rwkv-4-3b": Preset("rwkv", "RWKV/rwkv-4-3b-pile", 2_984_627_200, _mixer_sizes(2560, 32)),
    "rwkv-4-7b": Preset("rwkv", "RWKV/rwkv-4-7b-pile", 7_392_649_216, _mixer_sizes(4096, 32)),
    "rwkv-4-14b": Preset("rwkv", "RWKV/rwkv-4-14b-pile", 14_148_597_760, _mixer_sizes(5120, 40)),
    "smollm2-135m": Preset(
        "llama",
        "HuggingFaceTB/SmolLM2-135M",
        134_515_008,
        _SMOLLM2 | _transformer_sizes(576, 1536, 30, 9, 3) | {"rope_theta": 1e5},
    ),
    "smollm2-360m": Preset(
        "llama",
        "HuggingFaceTB/SmolLM2-360M",
        361_821_120,
        _SMOLLM2 | _transformer_sizes(960, 2560, 32, 15, 5) | {"rope_theta": 1e5},
    ),
    "smollm2-1.7b": Preset(
        "llama",
        "HuggingFaceTB/SmolLM2-1.7B",
        1_711_376_384,
        _SMOLLM2 | _transformer_sizes(2048, 8192, 24, 32, 32) | {"rope_theta": 1.3e5},
    ),
    "tinyllama-1.1b": Preset(
        "llama", "TinyLlama/TinyLlama_v1.1", 1_100_048_384, _EPSILON | _transformer_sizes(2048, 5632, 22, 32, 4)
    ),
}
"""Every preset by name. Sizes are those of the source's config.json.

Sources of the counts: model cards for GPT-NeoX-20B and Pythia, the hub (safetensors) for the others. Here only
trainable parameters count, and each once. The hub also counts buffers (attention masks of GPT-2, RoPE frequencies of
Llama 2, selection biases of routers), the multi-token prediction layers of GLM-4.5 and DeepSeek-V3, the scales of
DeepSeek-V3's 8-bit weights, and the tied matrix of the two smallest Qwen3 twice. Some published counts of active
parameters leave out the embedding but not the head: so does GPT-OSS (table 1 of arXiv:2508.10925). Those of GLM-4.5 and
DeepSeek-V2-Lite, which leave out the embedding too, are not listed."""


def preset(name: str, /, *, key: Key[Array, ""], **changes: Any) -> Decoder:
    """Build a model of a published size with new weights: `preset("llama3-8b", key=key)`. `list_presets()` returns the
    names.

    - `changes`: config.json keys to replace, under the family's names or the canonical ones. `num_hidden_layers=2`
      makes a small model of the same architecture.

    `zoo.save` writes the model as a checkpoint of its family, which `zoo.load` and transformers read. To initialize it
    sharded over a mesh: `zoo.init(lambda key: zoo.models.preset("llama3-8b", key=key), key, mesh)`.

    Sizes and architecture are the published ones, the initialization is that of `Transformer`: matrices have standard
    deviation 1 / sqrt(inputs); those that write to the residual stream are divided by sqrt(2 layers) (GPT-2, section
    2.3), by sqrt(layers) in a Mamba layer, which has one; embeddings have 1 / sqrt(hidden_size); biases are zero, norms
    one. Time steps, decays and token shifts follow their papers (`zoo.layers`). There is no dropout. Parameters are
    float32.

    **Raises** `ValueError` for an unknown name, with the nearest ones, and its subclass `ConfigError` for invalid
    changes.
    """
    entry = find_preset(name)
    family, config = _find_family(entry), _override_config(entry, changes)
    try:
        model = family.build(read_config(family, config, ignore=None), key=key)
    except ValueError as error:  # an invalid key, or sizes that do not fit together
        raise ConfigError(f"{name} with another {' and '.join(changes)}: {error}") from None
    return dataclasses.replace(model, origin=Origin(family, json.dumps(config)))


def list_presets() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(PRESETS)


def find_preset(name: str) -> Preset:
    """Return a preset by name. **Raises** `ValueError` for an unknown name, with the nearest ones."""
    if name in PRESETS:
        return PRESETS[name]
    short_name = name.lower().rpartition("/")[2].removeprefix("meta-")  # names on the hub are longer
    matches = difflib.get_close_matches(short_name, PRESETS, n=4, cutoff=0.6)
    hint = f"nearest are {', '.join(matches)}" if matches else f"there are {', '.join(PRESETS)}"
    raise ValueError(f"there is no preset {name!r}; {hint}")


def _override_config(entry: Preset, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset's config.json with these keys replaced."""
    family = _find_family(entry)
    if "model_type" in changes:
        raise ConfigError(f"model_type is no key to change: the preset is a {family.name}")
    replaced = {family.aliases.get(key, key) for key in changes}
    if "rope_parameters" in replaced:  # it replaces several keys of the older spelling
        replaced |= set(ROPE_CONFIG_KEYS)
    unchanged = {key: value for key, value in entry.config.items() if family.aliases.get(key, key) not in replaced}
    return {"architectures": [family.architecture], "model_type": family.name, **unchanged, **changes}


def _find_family(entry: Preset) -> Family:
    """Look up the family of a preset. Their modules are imported at first use, not with `zoo`."""
    from ..hf.families import FAMILIES

    return FAMILIES[entry.family]
