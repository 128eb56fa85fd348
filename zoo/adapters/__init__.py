"""Adapters: what is learnt on top of a finished model, whose own parameters stay as they are."""

from .apply import dora, ia3, loha, lokr, lora, vera
from .base import AbstractAdapter
from .compose import adapter_names, remove, select_per_row, set_strength
from .lora_plus import lora_plus
from .merge import merge, unmerge
from .methods.adalora import AdaLoRA, adalora, orthogonality
from .methods.dora import DoRA
from .methods.embedding import EmbeddingLoRA
from .methods.ia3 import IA3
from .methods.lora import LoRA
from .methods.lycoris import LoHa, LoKr
from .methods.modules_to_save import unfreeze
from .methods.oft import OFT, oft
from .methods.rank_allocation import keep_top_ranks, rank_importance
from .methods.vera import VeRA
from .peft.read import load
from .peft.write import save
from .quantize import dequantize, quantize
from .targets import find_linears, match_targets

__all__ = [
    "IA3",
    "OFT",
    "AbstractAdapter",
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
