"""One small file a family of checkpoints: how its config maps to our layers, and how its tensors are named."""

from zoo.models.facts import Family

from .gemma import GEMMA
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (GEMMA, GPT2, GPT_NEOX, LLAMA, MISTRAL, QWEN2, QWEN3)}


def families() -> tuple[str, ...]:
    """The `model_type` of every family that `zoo.load` reads and `zoo.save` writes."""
    return tuple(sorted(FAMILIES))


__all__ = ["FAMILIES", "families"]
