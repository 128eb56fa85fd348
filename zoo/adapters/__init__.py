"""Adapters: what is learnt on top of a finished model, whose own parameters stay as they are."""

from .abstract import AbstractAdapter
from .added import LoHa, LoKr
from .dora import DoRA
from .ia3 import IA3
from .lora import LoRA
from .merge import labels, merge, unmerge, weighted, without
from .peft_read import load
from .peft_write import save
from .surgery import dora, ia3, loha, lokr, lora, vera
from .targets import chooser, matrices
from .vera import VeRA

__all__ = [
    "IA3",
    "AbstractAdapter",
    "DoRA",
    "LoHa",
    "LoKr",
    "LoRA",
    "VeRA",
    "chooser",
    "dora",
    "ia3",
    "labels",
    "load",
    "loha",
    "lokr",
    "lora",
    "matrices",
    "merge",
    "save",
    "unmerge",
    "vera",
    "weighted",
    "without",
]
