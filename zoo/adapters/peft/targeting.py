"""Modules that an adapter_config.json names: which have an adapter, and which are trained in full, by PEFT's rules."""

import re
from collections.abc import Collection, Mapping
from typing import Any

_ALL_LINEAR = "all-linear"
_LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(\d+)\.")


def is_targeted(config: Mapping[str, Any], module: str, *, in_all_linear: bool) -> bool:
    """Return True if a module has an adapter by `target_modules`, `exclude_modules`, `layers_to_transform` and
    `modules_to_save`.

    - `in_all_linear`: True if `"all-linear"` includes the module.
    """
    targets = config["target_modules"] or ()
    if _matches(config["exclude_modules"] or (), module) or is_saved(config, module):
        return False
    if isinstance(targets, str):
        if targets.lower() == _ALL_LINEAR:
            return in_all_linear
        return re.fullmatch(targets, module) is not None
    return module in targets or (_matches(targets, module) and _is_selected_layer(config, module))


def is_targeted_parameter(config: Mapping[str, Any], parameter: str) -> bool:
    """Return True if a parameter, such as all experts' `down_proj`, has a LoRA by `target_parameters`."""
    return _matches(config.get("target_parameters") or (), parameter)


def is_feedforward(config: Mapping[str, Any], module: str) -> bool:
    """Return True if an IA3 multiplies the inputs of a module."""
    targets = config["feedforward_modules"] or ()
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return module.endswith(tuple(targets))


def is_saved(config: Mapping[str, Any], module: str) -> bool:
    """Return True if a module, or one that contains it, is among the `modules_to_save`."""
    return any(is_saved_by(name, module) for name in config["modules_to_save"] or ())


def is_saved_by(name: str, module: str) -> bool:
    """Return True if one of the `modules_to_save` means a module or one that contains it: PEFT compares the ends of
    names, so that `norm` means `model.norm` and `input_layernorm`."""
    words = module.split(".")
    return any(".".join(words[:count]).endswith(name) for count in range(1, len(words) + 1))


def _matches(targets: str | Collection[str], name: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return name in targets or any(name.endswith(f".{target}") for target in targets)


def _is_selected_layer(config: Mapping[str, Any], module: str) -> bool:
    """Return True unless `layers_to_transform` leaves the module's layer out. `layers_pattern` has the name of the list
    of layers; without it, the first number of the name counts."""
    layers = config["layers_to_transform"]
    patterns = config["layers_pattern"] or ()
    if layers is None or layers == []:
        return True
    words = [patterns] if isinstance(patterns, str) else patterns
    expressions = [rf"(?:.*?\.)?{word}\.(\d+)\." for word in words] or [_LAYER_NUMBER]
    match = next((match for expression in expressions if (match := re.match(expression, module))), None)
    return match is not None and int(match[1]) in ([layers] if isinstance(layers, int) else layers)
