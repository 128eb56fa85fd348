"""Families of checkpoints, one file of facts each: how a config maps to our layers, and how tensors are named."""

from zoo.models.hf.spec import Family

from .deepseek_v2 import DEEPSEEK_V2
from .deepseek_v3 import DEEPSEEK_V3
from .dots1 import DOTS1
from .ernie4_5_moe import ERNIE4_5_MOE
from .falcon_mamba import FALCON_MAMBA
from .gemma import GEMMA
from .glm4_moe import GLM4_MOE
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .granitemoe import GRANITEMOE
from .llama import LLAMA
from .mamba import MAMBA
from .mamba2 import MAMBA2
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmoe import OLMOE
from .qwen2 import QWEN2
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE
from .rwkv import RWKV

ALL_FAMILIES = (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    ERNIE4_5_MOE,
    FALCON_MAMBA,
    GEMMA,
    GLM4_MOE,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GRANITEMOE,
    LLAMA,
    MAMBA,
    MAMBA2,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    RWKV,
)
FAMILIES: dict[str, Family] = {family.name: family for family in ALL_FAMILIES}


def families() -> tuple[str, ...]:
    """Return the `model_type` of every family that `zoo.load` reads and `zoo.save` writes."""
    return tuple(sorted(FAMILIES))


__all__ = ["FAMILIES", "families"]
