"""Parameter-efficient fine-tuning: adapters such as LoRA wrap the frozen linear layers of a model."""

from .compose import adapter_names, remove, select_per_row, set_strength
from .dequantize import dequantize
from .lora_plus import lora_plus
from .merge import merge, unmerge
from .methods.adalora import adalora, orthogonality
from .methods.dora import dora
from .methods.ia3 import ia3
from .methods.lora import LoRA, lora
from .methods.lycoris import loha, lokr
from .methods.modules_to_save import unfreeze
from .methods.oft import oft
from .methods.state import state
from .methods.token_rows import prompt, token_rows
from .methods.vera import vera
from .peft.read import load
from .peft.write import save
from .quantize import quantize
from .rank_search import find_rank

__all__ = [
    "LoRA",
    "adalora",
    "adapter_names",
    "dequantize",
    "dora",
    "find_rank",
    "ia3",
    "load",
    "loha",
    "lokr",
    "lora",
    "lora_plus",
    "merge",
    "oft",
    "orthogonality",
    "prompt",
    "quantize",
    "remove",
    "save",
    "select_per_row",
    "set_strength",
    "state",
    "token_rows",
    "unfreeze",
    "unmerge",
    "vera",
]
