"""Adapters that PEFT's files cannot hold, or that PEFT refuses: known before they are trained."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.models.parameter_paths import format_path
from zoo.models.targets import ALL_LINEAR, LinearSite, Targets, match_targets, matches
from zoo.weights.safetensors import CheckpointError

from .names import PeftModule, get_family_name, get_name_table, list_peft_modules, translate_targets

_logger = logging.getLogger("zoo")
_REWRITTEN_FAMILIES = frozenset(
    """
    afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe glm4_moe glm4_moe_lite
    glm_moe_dsa hunyuan_v1_moe mellum minimax minimax_m2 mixtral olmoe qwen3_moe qwen3_next sarvam_mla solar_open
    """.split()
)
_EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""With transformers 5, PEFT 0.21 takes every target of these names for the experts or the router, in LoRAs and DoRAs of
`_REWRITTEN_FAMILIES`: also shared experts, dense layers and gates of attention, with their full path."""
_MAMBA_FAMILIES = ("mamba", "mamba2", "falcon_h1", "falcon_mamba", "nemotron_h")
"""Families for which PEFT 0.21 refuses a LoRA, DoRA or AdaLoRA of `out_proj`: kernels read its weight directly."""
_MAX_LISTED = 4
_NO_MODULE = "no module of its own in PEFT's files"


def is_taken_for_experts(family: str, peft_name: str) -> bool:
    """Return True for a module that PEFT takes for the experts or the router if `target_modules` names it."""
    return family in _REWRITTEN_FAMILIES and peft_name.rpartition(".")[2] in _EXPERT_NAMES


def find_limit(module: PeftModule, family: str, method: str) -> str | None:
    """Return why PEFT has no adapter of a method, such as "LoRA", for a module; None if it has one."""
    if module.parameter and "experts" not in module.site.name:
        return f"{module.parameter} is a parameter that PEFT does not wrap"
    if module.holds_experts and method != "LoRA":
        return f"{module.parameter} holds all experts, for which PEFT has LoRA only, not {method}"
    if method == "DoRA" and is_taken_for_experts(family, module.peft_name):
        return f"PEFT takes {module.peft_name} of {family} for an expert, for which it has LoRA only, not DoRA"
    return None


def resolve_targets(model: Any, targets: Targets, sites: Sequence[LinearSite], method: str) -> Targets:
    """Return targets in the paths of this library. `"all-linear"` leaves out the layers for which PEFT has no adapter
    of a method, such as "LoRA". One line in the log names these, and another the targets that cannot be saved.

    **Raises** `ValueError` for a target that matches nothing, with similar names.
    """
    targets = translate_targets(model, targets, sites)
    is_target = match_targets(targets, sites)
    limits = {path: reason for path, reason in _find_limits(model, sites, method).items() if is_target(path)}
    if not limits:
        return targets
    if callable(targets):
        given: list[str] = []
    else:
        given = [targets] if isinstance(targets, str) else list(targets)
    named = [target for target in given if target != ALL_LINEAR]
    left_out = set()
    if ALL_LINEAR in given:
        left_out = {path for path in limits if not any(matches(target, path) for target in named)}
    kept = {path for site in sites for path in site.list_names().values() if is_target(path)} - left_out
    if not kept:
        left_out = set()
        kept = set(limits)
    if left_out:
        _logger.warning(
            "%s: %r leaves out %s. Name them in targets= to train and merge them",
            method,
            ALL_LINEAR,
            _list_reasons(left_out, limits),
        )
    if refused := kept & limits.keys():
        fine = sorted({path.rpartition(".")[2] for path in kept - refused})
        _logger.warning(
            "%s: an adapter for PEFT cannot have %s. Targets that can: %s",
            method,
            _list_reasons(refused, limits),
            ", ".join(fine) or "none of these",
        )
    return lambda path: path in kept


def _find_limits(model: Any, sites: Sequence[LinearSite], method: str) -> dict[str, str]:
    """Map the path of each layer for which PEFT has no adapter of a method to the reason. A model of no family has none
    of PEFT's names, and no limits."""
    try:
        family = get_family_name(model)
        table = get_name_table(model, in_memory=True)
    except CheckpointError:
        return {}
    limits = {path: _NO_MODULE for site in sites for path in site.list_names().values()}
    for module in list_peft_modules(model, table):
        indices = tuple(run[i] for run, i in zip(module.site.ranges, module.index, strict=True))
        path = format_path(module.site.name, indices)
        reason = find_limit(module, family, method) or _find_refusal(module, family, method)
        if reason is None:
            limits.pop(path, None)
        else:
            limits[path] = reason
    return limits


def _find_refusal(module: PeftModule, family: str, method: str) -> str | None:
    """Return why PEFT does not read a file that can be written, and that this library reads."""
    is_out_proj = module.peft_name.rpartition(".")[2] == "out_proj"
    if is_out_proj and family in _MAMBA_FAMILIES and method in ("LoRA", "DoRA", "AdaLoRA"):
        return f"PEFT refuses out_proj of {family}, which kernels read directly"
    if ".router." in module.site.name and method != "LoRA":
        return f"PEFT refuses {method} of routers that are not a torch.nn.Linear"
    return None


def _list_reasons(paths: set[str], limits: Mapping[str, str]) -> str:
    """List paths with stars for numbers of layers, and the reason of the first."""
    reasons: dict[str, str] = {}
    for path in sorted(paths):
        reasons.setdefault(re.sub(r"\.\d+(?=\.)", ".*", path), limits[path])
    listed = [f"{pattern} ({reason})" for pattern, reason in reasons.items()]
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + more
