"""Build PEFT's adapter_config.json of an adapter: the options that every module of it is read with."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from zoo.weights.safetensors import CheckpointError

from ..methods.adalora import RANK_EPSILON, AdaLoRA
from ..methods.dora import DoRA
from ..methods.embedding import EmbeddingLoRA
from ..methods.ia3 import IA3
from ..methods.lora import LoRA
from ..methods.lycoris import LoHa, LoKr
from ..methods.oft import OFT
from ..methods.vera import VeRA
from ..names import PeftModule
from ..peft_limits import is_taken_for_experts
from .join import Experts, get_first_layer, get_joined_rank
from .methods import METHODS, find_factor_shapes, find_nearest_divisor

_Adapters = Mapping[str, tuple[PeftModule, Any, Any]]
"""PEFT's module names -> the module, its adapter (of one part or expert, if there are several), and its values."""


def build_config(by_module: Mapping[str, Experts], *, family: str, bias: str) -> dict[str, Any]:
    """Build the options of an adapter's method, and its target modules. **Raises** `CheckpointError` for an adapter
    that no options of PEFT's describe."""
    adapters = {name: get_first_layer(experts) for name, experts in by_module.items()}
    for module, adapter, _ in adapters.values():
        _refuse_strength(module, adapter)
    _, adapter, _ = next(iter(adapters.values()))
    if bias != "none" and not isinstance(adapter, LoRA | DoRA | EmbeddingLoRA):
        raise CheckpointError(f"biases are trained with {type(adapter).__name__}, which PEFT's files do not have")
    parameters = _list_target_parameters(adapters, family)
    config = {
        "fan_in_fan_out": any(
            module.mapping.transposed and not module.holds_experts for module, _, _ in adapters.values()
        ),
        "target_modules": sorted(adapters.keys() - parameters.keys()),
    }
    match adapter:
        case IA3():
            options = _build_ia3_config(adapters)
        case VeRA():
            options = _build_vera_config(adapter)
        case LoHa() | LoKr():
            options = _build_lycoris_config(adapters)
        case OFT():
            options = _build_oft_config(adapters)
        case AdaLoRA():
            options = _build_adalora_config(adapters)
        case _:
            options = _build_lora_config(by_module, parameters, bias)
    return {**config, **options}


def _refuse_strength(module: PeftModule, adapter: Any) -> None:
    """**Raises** `CheckpointError` for a strength that PEFT's files cannot hold: theirs is the factor of a LoRA."""
    strength = np.asarray(adapter.strength)[module.index]
    if strength != 1 and not isinstance(adapter, LoRA | EmbeddingLoRA):
        raise CheckpointError(
            f"the adapter {adapter.adapter_name!r} has the strength {strength:g}, and PEFT's files of "
            f"{type(adapter).__name__} hold no factor: save it at strength 1 (adapters.set_strength), or merge it"
        )


def _list_target_parameters(adapters: _Adapters, family: str) -> dict[str, str]:
    """Map the modules that hold a parameter of `target_parameters` to its name: all experts; of LoRAs also routers,
    which are not a Linear where experts are one parameter, and modules that PEFT would take for experts."""
    modules = {name: module for name, (module, _, _) in adapters.items()}
    holders = {name: module.parameter for name, module in modules.items() if module.holds_experts}
    others = {
        name: f"{name}.weight"
        for name, (module, adapter, _) in adapters.items()
        if isinstance(adapter, LoRA)
        and name not in holders
        and (".router." in module.site.name or is_taken_for_experts(family, name))
    }
    if (holders or others) and any(isinstance(adapter, DoRA) for _, adapter, _ in adapters.values()):
        raise CheckpointError("use_dora and target_parameters, all experts in one, exclude each other in PEFT's files")
    return holders | others


def _build_lora_config(by_module: Mapping[str, Experts], parameters: Mapping[str, str], bias: str) -> dict[str, Any]:
    ranks: dict[str, int] = {}
    alphas: dict[str, float | int] = {}
    for name, experts in by_module.items():
        key = parameters.get(name, name)
        ranks[key] = max(get_joined_rank(parts) for parts in experts.values())
        alphas[key] = _get_module_scale(name, experts) * ranks[key]
    rank = _get_most_common(ranks)
    alpha = _get_most_common(alphas)
    adapters = [get_first_layer(experts)[1] for experts in by_module.values()]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "bias": bias,
        "lora_dropout": max((lora.dropout for lora in adapters if isinstance(lora, LoRA | DoRA)), default=0.0),
        "use_dora": any(isinstance(adapter, DoRA) for adapter in adapters),
        "use_rslora": False,
        "init_lora_weights": True,
    }
    if parameters:
        config["target_parameters"] = sorted(parameters.values())
        config["lora_dropout"] = 0.0  # PEFT has no dropout there, and reads no file that asks for it
    return config


def _get_most_common(values: Mapping[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]


def _get_module_scale(peft_name: str, experts: Experts) -> float | int:
    """Return alpha / rank of one module, times the strength. **Raises** `CheckpointError` if its experts, or the parts
    of a fused module, differ."""
    layers = [layer for parts in experts.values() for layer in parts.values()]
    factors = [np.asarray(adapter.scale) * np.asarray(adapter.strength) for _, adapter, _ in layers]
    scales = {float(factor[module.index]) for factor, (module, _, _) in zip(factors, layers, strict=True)}
    if len(scales) > 1:
        raise CheckpointError(
            f"{peft_name} is one module in PEFT's files, and its parts are scaled by {sorted(scales)}"
        )
    return _as_integer(scales.pop())


def _as_integer(value: float) -> float | int:
    """Return an integer if the number is one, as PEFT's configs have it."""
    return int(value) if value.is_integer() else value


def _build_ia3_config(adapters: _Adapters) -> dict[str, Any]:
    inputs = sorted(name for name, (_, ia3, _) in adapters.items() if ia3.of_in is not None)
    return {"peft_type": "IA3", "feedforward_modules": inputs, "init_ia3_weights": True}


def _build_vera_config(adapter: VeRA) -> dict[str, Any]:
    return {
        "peft_type": "VERA", "r": adapter.down_scale.shape[-1], "bias": "none", "save_projection": True,
        "projection_prng_key": 0, "vera_dropout": 0.0, "d_initial": 0.1, "init_weights": True,
    }  # fmt: skip


def _build_lycoris_config(adapters: _Adapters) -> dict[str, Any]:
    """Build the config of a LoHa or LoKr. The scale is stored as alpha / rank. **Raises** `CheckpointError` if PEFT's
    one rank, factor and `decompose_both` do not give the factors of all modules."""
    _, adapter, _ = next(iter(adapters.values()))
    if isinstance(adapter, LoKr):
        options = _find_lokr_options(adapters)
    else:
        options = {"r": adapter.down.shape[-2]}
    if options is None or any(type(other) is not type(adapter) for _, other, _ in adapters.values()):
        raise CheckpointError("PEFT's files have one method, one rank and one decompose_factor for all modules")
    scales = {name: float(np.asarray(adapter.scale)[module.index]) for name, (module, adapter, _) in adapters.items()}
    alphas = {name: _as_integer(scale * options["r"]) for name, scale in scales.items()}
    alpha = _get_most_common(alphas)
    return {
        "peft_type": METHODS[type(adapter)].peft_type,
        "alpha": alpha,
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "rank_pattern": {},
        "init_weights": True,
        **options,
    }


def _find_lokr_options(adapters: _Adapters) -> dict[str, Any] | None:
    """Return the options of a LoKr for which PEFT makes factors of these shapes; None if there are none."""

    def list_shapes(module: PeftModule, adapter: LoKr) -> dict[str, tuple[int, ...]]:
        arrays = {tensor.field: tensor.get(adapter) for tensor in METHODS[LoKr].tensors}
        stacked = len(module.site.ranges)
        return {field: tuple(array.shape[stacked:]) for field, array in arrays.items() if array is not None}

    actual = {(module.site.get_shape(), tuple(list_shapes(module, a).items())) for module, a, _ in adapters.values()}

    def list_candidates() -> Iterator[dict[str, Any]]:
        sizes = [size for _, shapes in actual for _, shape in shapes for size in shape]
        ranks = {shape[0] for _, shapes in actual for field, shape in shapes if field.endswith("_down")}
        for rank in ranks or {max(sizes)}:  # without low-rank factors, any rank that PEFT does not decompose for
            for factor in (-1, *range(1, max(sizes) + 1)):
                for both in (False, True):
                    yield {"rank": rank, "factor": factor, "both": both}

    for options in list_candidates():
        if all(find_factor_shapes(*shape, **options) == dict(shapes) for shape, shapes in actual):
            rank, factor, both = options.values()
            return {"r": rank, "decompose_factor": factor, "decompose_both": both}
    return None


def _build_oft_config(adapters: _Adapters) -> dict[str, Any]:
    """Build the config of an OFT. It has one block size, or one block count, for all modules, and PEFT takes the
    nearest divisor of each module's inputs. **Raises** `CheckpointError` if no number gives the blocks of all
    modules."""
    sizes = [(module.site.get_shape()[1], adapter) for module, adapter, _ in adapters.values()]
    expected = {
        "oft_block_size": {(inputs, adapter.block_size) for inputs, adapter in sizes},
        "r": {(inputs, inputs // adapter.block_size) for inputs, adapter in sizes},
    }
    candidates = [(key, sorted({number for _, number in pairs})) for key, pairs in expected.items()]
    candidates += [(key, range(1, max(inputs for inputs, _ in sizes) + 1)) for key in expected]

    def fits(key: str, value: int) -> bool:
        return all(find_nearest_divisor(inputs, value) == number for inputs, number in expected[key])

    chosen = next(({key: value} for key, values in candidates for value in values if fits(key, value)), None)
    options = {(adapter.shared is not None, adapter.neumann_terms) for _, adapter in sizes}
    if chosen is None or len(options) > 1:
        raise CheckpointError("PEFT's files have one size of blocks, or one count, and one form of OFT for all modules")
    shared, terms = options.pop()
    # PEFT checks the version that wrote a file: 0.18 is the first with this Neumann series.
    return {
        "peft_type": "OFT", "peft_version": "0.18.0", "r": 0, "oft_block_size": 0, **chosen, "bias": "none",
        "block_share": shared, "use_cayley_neumann": terms is not None, "num_cayley_neumann_terms": terms or 5,
        "coft": False, "module_dropout": 0.0, "init_weights": True,
    }  # fmt: skip


def _build_adalora_config(adapters: _Adapters) -> dict[str, Any]:
    """Build the config of an AdaLoRA, where a module keeps its first `rank` ranks. **Raises** `CheckpointError` if
    scales differ between modules, which the format cannot store."""
    ranks = {name: int(np.asarray(adapter.rank)[module.index]) for name, (module, adapter, _) in adapters.items()}
    scales = {float(np.asarray(adapter.scale)[module.index]) for module, adapter, _ in adapters.values()}
    if len(scales) > 1:
        raise CheckpointError(f"PEFT's files have one alpha for all AdaLoRA's modules, and they have {sorted(scales)}")
    max_rank = max(1, *ranks.values())
    alpha = float(f"{scales.pop() * (max_rank + RANK_EPSILON):.6g}")
    rank_pattern = {
        f"{name}.lora_E": [True] * rank + [False] * (max_rank - rank) for name, rank in ranks.items() if rank < max_rank
    }
    return {
        "peft_type": "ADALORA", "init_r": max_rank, "lora_alpha": _as_integer(alpha),
        "rank_pattern": rank_pattern or None, "total_step": 1, "bias": "none", "lora_dropout": 0.0,
        "init_lora_weights": True,
    }  # fmt: skip
