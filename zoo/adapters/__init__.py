"""Parameter-efficient fine-tuning: adapters such as LoRA wrap the frozen linear layers of a model."""

from zoo.models.targets import find_linears, match_targets

from .base import AbstractAdapter, AbstractLinearAdapter
from .compose import adapter_names, remove, select_per_row, set_strength
from .dequantize import dequantize
from .lora_plus import lora_plus
from .merge import merge, unmerge
from .methods.adalora import AdaLoRA, adalora, orthogonality
from .methods.dora import DoRA, dora
from .methods.embedding import EmbeddingLoRA
from .methods.ia3 import IA3, ia3
from .methods.lora import LoRA, lora
from .methods.lycoris import LoHa, LoKr, loha, lokr
from .methods.modules_to_save import unfreeze
from .methods.oft import OFT, oft
from .methods.rank_allocation import keep_top_ranks, rank_importance
from .methods.vera import VeRA, vera
from .peft.read import load
from .peft.write import save
from .quantize import quantize
from .rank_search import find_rank

__all__ = [
    "IA3",
    "OFT",
    "AbstractAdapter",
    "AbstractLinearAdapter",
    "AdaLoRA",
    "DoRA",
    "EmbeddingLoRA",
    "LoHa",
    "LoKr",
    "LoRA",
    "VeRA",
    "adalora",
    "adapter_names",
    "dequantize",
    "dora",
    "find_linears",
    "find_rank",
    "ia3",
    "keep_top_ranks",
    "load",
    "loha",
    "lokr",
    "lora",
    "lora_plus",
    "match_targets",
    "merge",
    "oft",
    "orthogonality",
    "quantize",
    "rank_importance",
    "remove",
    "save",
    "select_per_row",
    "set_strength",
    "unfreeze",
    "unmerge",
    "vera",
]
