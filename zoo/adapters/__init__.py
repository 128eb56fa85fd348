"""Adapters: what is learnt on top of a finished model, whose own parameters stay as they are."""

from .abstract import AbstractAdapter
from .adalora import AdaLoRA, adalora, orthogonality
from .added import LoHa, LoKr
from .allocation import allocated, importance
from .dora import DoRA
from .embedding import EmbeddingLoRA
from .full import full
from .ia3 import IA3
from .lora import LoRA
from .merge import merge, unmerge
from .oft import OFT, oft
from .peft_read import load
from .peft_write import save
from .plus import lora_plus
from .quantise import dequantise, quantise
from .several import by_row, labels, weighted, without
from .targets import chooser, matrices
from .vera import VeRA
from .wrap import dora, ia3, loha, lokr, lora, vera

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
    "allocated",
    "by_row",
    "chooser",
    "dequantise",
    "dora",
    "full",
    "ia3",
    "importance",
    "labels",
    "load",
    "loha",
    "lokr",
    "lora",
    "lora_plus",
    "matrices",
    "merge",
    "oft",
    "orthogonality",
    "quantise",
    "save",
    "unmerge",
    "vera",
    "weighted",
    "without",
]
