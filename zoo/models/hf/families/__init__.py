"""Families of checkpoints, one file of facts each: how a config maps to our layers, and how tensors are named.

Layers that only one family has lie beside it, in `NAME_layers.py`.
"""

from zoo.models.hf.spec import Family
from zoo.models.hf.support import FamilySupport, read_support

from .afmoe import AFMOE
from .albert import ALBERT
from .apertus import APERTUS
from .arcee import ARCEE
from .axk1 import AXK1
from .bailing_hybrid import BAILING_HYBRID
from .bamba import BAMBA
from .bert import BERT
from .biogpt import BIOGPT
from .bloom import BLOOM
from .camembert import CAMEMBERT
from .codegen import CODEGEN
from .cohere import COHERE
from .cohere2 import COHERE2
from .cohere2_moe import COHERE2_MOE
from .cwm import CWM
from .deberta_v2 import DEBERTA_V2
from .deepseek_v2 import DEEPSEEK_V2
from .deepseek_v3 import DEEPSEEK_V3
from .deepseek_v32 import DEEPSEEK_V32
from .diffllama import DIFFLLAMA
from .dinov2 import DINOV2
from .dinov3_vit import DINOV3_VIT
from .distilbert import DISTILBERT
from .dots1 import DOTS1
from .electra import ELECTRA
from .ernie4_5 import ERNIE4_5
from .ernie4_5_moe import ERNIE4_5_MOE
from .eurobert import EUROBERT
from .exaone import EXAONE
from .exaone4 import EXAONE4
from .exaone_moe import EXAONE_MOE
from .falcon import FALCON
from .falcon_h1 import FALCON_H1
from .falcon_mamba import FALCON_MAMBA
from .gemma import GEMMA
from .gemma2 import GEMMA2
from .gemma3_text import GEMMA3_TEXT
from .gemma3n_text import GEMMA3N_TEXT
from .gemma4_text import GEMMA4_TEXT
from .glm import GLM
from .glm4 import GLM4
from .glm4_moe import GLM4_MOE
from .glm4_moe_lite import GLM4_MOE_LITE
from .glm_moe_dsa import GLM_MOE_DSA
from .gpt2 import GPT2
from .gpt_bigcode import GPT_BIGCODE
from .gpt_neo import GPT_NEO
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .gptj import GPTJ
from .granite import GRANITE
from .granite_swa import GRANITE_SWA
from .granitemoe import GRANITEMOE
from .granitemoe_swa import GRANITEMOE_SWA
from .granitemoehybrid import GRANITEMOEHYBRID
from .granitemoeshared import GRANITEMOESHARED
from .helium import HELIUM
from .hunyuan_v1_dense import HUNYUAN_V1_DENSE
from .hunyuan_v1_moe import HUNYUAN_V1_MOE
from .hy_v3 import HY_V3
from .hyperclovax import HYPERCLOVAX
from .internlm3 import INTERNLM3
from .iquestcoder import IQUESTCODER
from .jais2 import JAIS2
from .jamba import JAMBA
from .jetmoe import JETMOE
from .kimi_linear import KIMI_LINEAR
from .kolibri1 import KOLIBRI1
from .laguna import LAGUNA
from .lara_mini import LARA_MINI
from .lfm2 import LFM2
from .lfm2_moe import LFM2_MOE
from .lfm3 import LFM3
from .llama import LLAMA
from .llama4_text import LLAMA4_TEXT
from .mamba import MAMBA
from .mamba2 import MAMBA2
from .mellum import MELLUM
from .mimo_v2_flash import MIMO_V2_FLASH
from .minimax import MINIMAX
from .minimax_m2 import MINIMAX_M2
from .ministral import MINISTRAL
from .ministral3 import MINISTRAL3
from .mistral import MISTRAL
from .mistral4 import MISTRAL4
from .mixtral import MIXTRAL
from .modernbert import MODERNBERT
from .mpnet import MPNET
from .mpt import MPT
from .nanochat import NANOCHAT
from .nemotron import NEMOTRON
from .nemotron_h import NEMOTRON_H
from .nomic_bert import NOMIC_BERT
from .olmo import OLMO
from .olmo2 import OLMO2
from .olmo3 import OLMO3
from .olmo_hybrid import OLMO_HYBRID
from .olmoe import OLMOE
from .opt import OPT
from .persimmon import PERSIMMON
from .phi import PHI
from .phi3 import PHI3
from .phimoe import PHIMOE
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_5_moe_text import QWEN3_5_MOE_TEXT
from .qwen3_5_text import QWEN3_5_TEXT
from .qwen3_moe import QWEN3_MOE
from .qwen3_next import QWEN3_NEXT
from .recurrent_gemma import RECURRENT_GEMMA
from .roberta import ROBERTA, XLM_ROBERTA
from .rwkv import RWKV
from .sarvam_mla import SARVAM_MLA
from .sarvam_moe import SARVAM_MOE
from .seed_oss import SEED_OSS
from .siglip_vision_model import SIGLIP_VISION_MODEL
from .smollm3 import SMOLLM3
from .solar_open import SOLAR_OPEN
from .stablelm import STABLELM
from .starcoder2 import STARCODER2
from .vaultgemma import VAULTGEMMA
from .vit import VIT
from .xglm import XGLM
from .xlm_roberta_xl import XLM_ROBERTA_XL
from .xlstm import XLSTM
from .zamba import ZAMBA
from .zamba2 import ZAMBA2

ALL_FAMILIES = (
    AFMOE,
    ALBERT,
    APERTUS,
    ARCEE,
    BAILING_HYBRID,
    BAMBA,
    BERT,
    BIOGPT,
    CAMEMBERT,
    CODEGEN,
    CWM,
    DEBERTA_V2,
    BLOOM,
    COHERE,
    COHERE2,
    COHERE2_MOE,
    AXK1,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DIFFLLAMA,
    DINOV2,
    DINOV3_VIT,
    DISTILBERT,
    DOTS1,
    ELECTRA,
    ERNIE4_5,
    ERNIE4_5_MOE,
    EUROBERT,
    EXAONE,
    EXAONE4,
    EXAONE_MOE,
    FALCON,
    FALCON_H1,
    FALCON_MAMBA,
    GEMMA,
    GEMMA2,
    GEMMA3_TEXT,
    GEMMA3N_TEXT,
    GEMMA4_TEXT,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GPT2,
    GPT_BIGCODE,
    GPT_NEO,
    GPT_NEOX,
    GPT_OSS,
    GPTJ,
    GRANITE,
    GRANITE_SWA,
    GRANITEMOE,
    GRANITEMOEHYBRID,
    GRANITEMOE_SWA,
    GRANITEMOESHARED,
    HELIUM,
    HUNYUAN_V1_DENSE,
    HUNYUAN_V1_MOE,
    HY_V3,
    HYPERCLOVAX,
    INTERNLM3,
    IQUESTCODER,
    JAIS2,
    JAMBA,
    JETMOE,
    KIMI_LINEAR,
    KOLIBRI1,
    LAGUNA,
    LARA_MINI,
    LFM2,
    LFM2_MOE,
    LFM3,
    LLAMA,
    LLAMA4_TEXT,
    MAMBA,
    MAMBA2,
    MELLUM,
    MIMO_V2_FLASH,
    MINIMAX,
    MINIMAX_M2,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MISTRAL4,
    MIXTRAL,
    MODERNBERT,
    MPNET,
    MPT,
    NANOCHAT,
    NEMOTRON,
    NEMOTRON_H,
    NOMIC_BERT,
    OLMO,
    OLMO2,
    OLMO3,
    OLMO_HYBRID,
    OLMOE,
    OPT,
    PERSIMMON,
    PHI,
    PHI3,
    PHIMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_MOE,
    QWEN3_NEXT,
    RECURRENT_GEMMA,
    ROBERTA,
    RWKV,
    SARVAM_MLA,
    SARVAM_MOE,
    SEED_OSS,
    SIGLIP_VISION_MODEL,
    SMOLLM3,
    SOLAR_OPEN,
    STABLELM,
    STARCODER2,
    VAULTGEMMA,
    VIT,
    XGLM,
    XLM_ROBERTA,
    XLM_ROBERTA_XL,
    XLSTM,
    ZAMBA,
    ZAMBA2,
)
FAMILIES: dict[str, Family] = {family.name: family for family in ALL_FAMILIES}
ALIASES: dict[str, str] = {
    "AXK1": "axk1",
    "gpt-sw3": "gpt2",
    "kimi_k2": "deepseek_v3",
}
"""Other names that files give to a family: `model_type` -> the family's own. Only names whose classes compute the same
with the same defaults. A config keeps the name that it came with."""


def get_family(model_type: str) -> Family | None:
    """Return the family of a `model_type`, by its own name or an alias; None if there is none."""
    return FAMILIES.get(ALIASES.get(model_type, model_type))


def families() -> dict[str, FamilySupport]:
    """Return the tested features of every family that `zoo.load` reads and `zoo.save` writes, by its `model_type`."""
    support = read_support()
    return {name: support.get(name, FamilySupport()) for name in sorted(FAMILIES)}


__all__ = ["ALIASES", "FAMILIES", "families", "get_family"]
