"""PEFT's `ensure_weight_tying`: adapters of an embedding that is also the head.

Here a tied head is the embedding, so it follows whatever is trained there. PEFT's head is a module of its own. Unless
`ensure_weight_tying` is set, PEFT trains one of the two and leaves the other as it was, which is another model. With
the option its files hold both, with equal values:

    LoRA              embed_tokens.lora_embedding_B = lm_head.lora_A transposed, lora_embedding_A = lora_B transposed
    modules_to_save   embed_tokens.weight = lm_head.weight
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from zoo.models.encoders.heads import MaskedLMHead
from zoo.weights.safetensors import CheckpointError, LazyTensor

from ..names import get_embedding_and_head_names
from .config import rank_from_config, scale_from_config
from .source import PREFIX, read_floats
from .targeting import is_saved, is_targeted

_Array = TypeVar("_Array", np.ndarray, LazyTensor)
TyingOption = Literal["target_modules", "modules_to_save"]
_TIED_NAMES = ("embed_tokens", "lm_head")
"""PEFT ties adapters only if its config has a module with one of these last names."""
_TYING_METHODS: Mapping[TyingOption, tuple[str, ...]] = {
    "target_modules": ("LORA",),
    "modules_to_save": ("LORA", "ADALORA"),
}
_HEAD_TENSORS: Mapping[str, tuple[str, bool]] = {
    "lora_A.weight": ("lora_embedding_B", True),
    "lora_B.weight": ("lora_embedding_A", True),
    "base_layer.weight": ("base_layer.weight", False),
    "weight": ("weight", False),
}
"""Suffix of a tensor of the head -> the suffix of the embedding's equal tensor, and whether it is transposed."""


class TiedModules(NamedTuple):
    """PEFT's names of an embedding and of the head that it is tied to."""

    embedding: str
    head: str


def find_tied_modules(model: Any) -> TiedModules | None:
    """Return the names of a model's embedding and head, or None if they are not tied."""
    head = getattr(model, "head", True)
    is_tied = head is None or (isinstance(head, MaskedLMHead) and head.decoder is None)
    return TiedModules(*get_embedding_and_head_names(model)) if is_tied else None


def find_tying_option(config: Mapping[str, Any]) -> TyingOption | None:
    """Return the option with which PEFT trains embedding and head as one, or None if the config trains them apart."""
    if not config.get("ensure_weight_tying"):
        return None
    if any(_get_last_name(name) in _TIED_NAMES for name in config["modules_to_save"] or ()):
        option: TyingOption = "modules_to_save"
    elif _targets_tied_name(config["target_modules"] or ()):
        option = "target_modules"
    else:
        return None
    return option if config["peft_type"] in _TYING_METHODS[option] else None


def _targets_tied_name(targets: Any) -> bool:
    if isinstance(targets, str):
        return any(re.fullmatch(targets, name) for name in _TIED_NAMES)
    return any(_get_last_name(name) in _TIED_NAMES for name in targets)


def _get_last_name(module: str) -> str:
    return module.rpartition(".")[2]


def resolve_tying(
    config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], tied: TiedModules | None, path: str
) -> tuple[dict[str, Any], Mapping[str, LazyTensor]]:
    """Return the config and the tensors of an adapter of only the embedding, as PEFT reads `ensure_weight_tying`.

    **Raises** `CheckpointError` if embedding and head are tied in the model and apart in the file, or if their tensors
    or scales differ.
    """
    if tied is None:
        return dict(config), tensors
    option = find_tying_option(config)
    if option is None:
        _refuse_apart(config, tensors, tied, path)
        return dict(config), tensors
    named = config[option]
    if isinstance(named, str):
        named = f"(?:{named}|^{re.escape(tied.embedding)}$)"
    else:
        named = [*(name for name in named if f".{name}." not in f".{tied.head}."), tied.embedding]
    if option == "target_modules":
        _check_equal_scales(config, tied, path)
    return {**config, option: named}, _drop_head_tensors(tensors, tied, path)


def _refuse_apart(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], tied: TiedModules, path: str) -> None:
    """**Raises** `CheckpointError` for an adapter of the embedding or of the head, which PEFT trains apart."""
    for module, other in (tied, tied[::-1]):
        is_named = is_saved(config, module) or is_targeted(config, module, in_all_linear=False)
        if not is_named and not any(name.startswith(f"{PREFIX}{module}.") for name in tensors):
            continue
        reason = "does not set ensure_weight_tying"
        if config.get("ensure_weight_tying"):
            names = " or ".join(_TIED_NAMES)
            reason = f"sets ensure_weight_tying, which PEFT follows for LoRA and AdaLoRA that name {names}"
        raise CheckpointError(
            f"{path} trains {module}, which is tied to {other} in this model. The file {reason}, so PEFT leaves "
            f"{other} as it was, which is another model: set tie_word_embeddings to false in the base's config.json, "
            "and store both matrices there"
        )


def _check_equal_scales(config: Mapping[str, Any], tied: TiedModules, path: str) -> None:
    """**Raises** `CheckpointError` if rank_pattern or alpha_pattern scale the two differently."""
    scales = [scale_from_config(config, module, rank_from_config(config, module)) for module in tied]
    if scales[0] != scales[1]:
        raise CheckpointError(
            f"{path}: rank_pattern and alpha_pattern scale {tied.embedding} by {scales[0]:g} and {tied.head} by "
            f"{scales[1]:g}, which are tied in this model"
        )


def _drop_head_tensors(tensors: Mapping[str, LazyTensor], tied: TiedModules, path: str) -> dict[str, LazyTensor]:
    """Return the tensors without the head's. **Raises** `CheckpointError` for one that differs from the embedding's."""
    remaining = dict(tensors)
    for head_name, embedding_name, is_transposed in _list_pairs(tied):
        if head_name not in tensors or embedding_name not in tensors:
            continue
        head = read_floats(remaining.pop(head_name), head_name, path)
        embedding = read_floats(tensors[embedding_name], embedding_name, path)
        if not np.array_equal(head.T if is_transposed else head, embedding):
            raise CheckpointError(
                f"{path}: {head_name} differs from {embedding_name}, and embedding and head are tied in this model"
            )
    return remaining


def _list_pairs(tied: TiedModules) -> Iterator[tuple[str, str, bool]]:
    """Yield the names of equal tensors of head and embedding, and whether one is the transpose of the other."""
    for suffix, (embedding_suffix, is_transposed) in _HEAD_TENSORS.items():
        yield f"{PREFIX}{tied.head}.{suffix}", f"{PREFIX}{tied.embedding}.{embedding_suffix}", is_transposed


def add_head_tensors(tensors: Mapping[str, np.ndarray], tied: TiedModules | None) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter with the tensors of the head, if it is tied to an embedding among them."""
    added = dict(tensors)
    for head_name, embedding_name, is_transposed in [] if tied is None else _list_pairs(tied):
        if embedding_name in tensors:
            array = tensors[embedding_name]
            added[head_name] = np.ascontiguousarray(array.T) if is_transposed else array
    return added


def build_tying_config(config: Mapping[str, Any], tied: TiedModules | None) -> dict[str, Any]:
    """Return a config with which PEFT ties the head to the embedding, if the adapter trains a tied embedding.

    **Raises** `CheckpointError` for a method and for module names that PEFT does not tie.
    """
    saved = config["modules_to_save"] or []
    targets = config["target_modules"]
    if tied is None or tied.embedding not in {*saved, *targets}:
        return dict(config)
    option: TyingOption = "modules_to_save" if tied.embedding in saved else "target_modules"
    named = config[option]
    if _get_last_name(tied.embedding) not in _TIED_NAMES:
        named = sorted([*named, tied.head])  # PEFT takes it out again
    tying = {**config, "ensure_weight_tying": True, option: named}
    for key in ("rank_pattern", "alpha_pattern"):
        if tied.embedding in (config.get(key) or {}):
            tying[key] = {**config[key], tied.head: config[key][tied.embedding]}
    if find_tying_option(tying) != option:
        raise CheckpointError(
            f"{tied.embedding} is trained, and tied to {tied.head}, which PEFT's files hold for LoRA, DoRA and AdaLoRA "
            f"of modules named {' or '.join(_TIED_NAMES)} only: merge the adapter and save the model, or untie the base"
        )
    return tying
