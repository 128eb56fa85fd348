"""Map an adapter's arrays to tensor names in PEFT's files.

The module names come from the name table of the model family. For a fused projection, the rows of B are split and
concatenated as the rows of its weight are. All parts share one A in the file; here each part has a copy. Experts whose
matrices are one parameter in PyTorch (`target_parameters`) have one LoRA in the file: A of shape [experts rank, in],
with an expert's ranks together, and B of shape [out, rank experts], with a rank's experts together.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from zoo.models.hf.spec import NameMap, Origin, TensorMapping, prefixed
from zoo.models.hf.wrappers import name_as_modules, rename
from zoo.models.parameter_paths import format_path, iterate_indices
from zoo.models.targets import LinearSite, find_linears
from zoo.weights import CheckpointError
from zoo.weights.plan import invert_name_map
from zoo.weights.safetensors import DTYPES, LazyTensor
from zoo.weights.save import read_name_map, resolve_origin

from .base import AbstractAdapter
from .compose import strip_adapters
from .methods.adalora import AdaLoRA
from .methods.dora import DoRA
from .methods.embedding import EmbeddingLoRA
from .methods.ia3 import IA3
from .methods.lora import LoRA
from .methods.lycoris import LoHa, LoKr
from .methods.oft import OFT
from .methods.vera import VeRA
from .quantize import dequantize

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
VERA_SHARED = {"base_model.vera_A": lambda vera: vera.down.weight, "base_model.vera_B": lambda vera: vera.up.weight}
"""Tensors that VeRA stores once for all modules."""

_FLOAT_DTYPES = {DTYPES[code]: code for code in ("F64", "F32", "F16", "BF16")}

LYCORIS_FIELDS = {
    "LOHA": {"hada_w1_a": "up", "hada_w1_b": "down", "hada_w2_a": "other_up", "hada_w2_b": "other_down"},
    "LOKR": {
        "lokr_w1": "left", "lokr_w1_a": "left_up", "lokr_w1_b": "left_down", "lokr_w2": "right",
        "lokr_w2_a": "right_up", "lokr_w2_b": "right_down",
    },
}  # fmt: skip
"""For LyCORIS methods: PEFT's tensor suffix -> our field."""


def read_floats(tensor: LazyTensor, name: str, path: str) -> np.ndarray:
    """Read a tensor of an adapter. **Raises** `CheckpointError` unless it has finite floating-point numbers."""
    if tensor.dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            f"{path}: {name} is of {tensor.dtype}, where floating-point numbers were expected: "
            f"{', '.join(_FLOAT_DTYPES.values())}"
        )
    array = np.asarray(tensor.read())
    if not np.isfinite(array).all():
        raise CheckpointError(f"{path}: {name} has a number that is not finite")
    return array


class PeftTensor(NamedTuple):
    """One array of an adapter in PEFT's format."""

    suffix: str
    get: Callable[[Any], Any]
    """Read it from one of our adapters, in PEFT's layout."""
    has_rows: bool = False
    """True if it has one row per output, so that it is split for a fused projection. Otherwise all parts share it."""
    rank_dim: int | None = None
    """The dim whose size is the rank."""


def list_peft_tensors(adapter: AbstractAdapter) -> list[PeftTensor]:
    """List the arrays of an adapter. **Raises** `NotImplementedError` for a method that PEFT does not have."""
    match adapter:
        case LoRA() | DoRA():
            tensors = [
                PeftTensor("lora_A.weight", lambda lora: lora.down.weight, rank_dim=0),
                PeftTensor("lora_B.weight", lambda lora: lora.up.weight, has_rows=True, rank_dim=1),
            ]
            if isinstance(adapter, DoRA):
                tensors.append(PeftTensor("lora_magnitude_vector", lambda dora: dora.magnitude, has_rows=True))
            return tensors
        case EmbeddingLoRA():
            return [
                PeftTensor("lora_embedding_A", lambda lora: lora.down.swapaxes(-1, -2), rank_dim=0),
                PeftTensor("lora_embedding_B", lambda lora: lora.up.weight, rank_dim=1),
            ]
        case IA3(of_in=None):
            return [PeftTensor("ia3_l", lambda ia3: ia3.of_out[..., None], has_rows=True)]
        case IA3():
            return [PeftTensor("ia3_l", lambda ia3: ia3.of_in[..., None, :])]
        case VeRA():
            return [
                PeftTensor("vera_lambda_d", lambda vera: vera.down_scale),
                PeftTensor("vera_lambda_b", lambda vera: vera.up_scale, has_rows=True),
            ]
        case OFT(shared=None):
            return [PeftTensor("oft_R.weight", lambda oft: oft.blocks)]
        case OFT():
            return [PeftTensor("oft_R.weight", lambda oft: oft.shared[..., None, :])]
        case AdaLoRA():
            return [
                PeftTensor("lora_A", lambda ada: ada.down.weight, rank_dim=0),
                PeftTensor("lora_B", lambda ada: ada.up.weight, has_rows=True, rank_dim=1),
                PeftTensor("lora_E", lambda ada: ada.values[..., None], rank_dim=0),
            ]
        case LoHa() | LoKr():
            fields = LYCORIS_FIELDS[type(adapter).__name__.upper()].items()
            has_rows = isinstance(adapter, LoHa)
            return [
                PeftTensor(suffix, attrgetter(field), has_rows=has_rows and suffix.endswith("_a"))
                for suffix, field in fields
                if getattr(adapter, field) is not None
            ]
    raise NotImplementedError(f"{type(adapter).__name__} has no form in PEFT's files")


class PeftModule(NamedTuple):
    """A module in PEFT's naming, and our layer that it holds, or that is one part of it if the module is fused."""

    peft_name: str
    site: LinearSite
    index: tuple[int, ...]
    mapping: TensorMapping
    part: int
    part_sizes: tuple[int, ...]
    """Number of outputs of each part."""
    parameter: str = ""
    """Name of the parameter that `target_parameters` may name: all experts' matrices. "" for one that has none."""
    row: int = 0
    """Number of the row of the family's name table."""

    @property
    def num_experts(self) -> int:
        """Number of experts whose matrices the module holds, 1 for a module of its own."""
        return len(self.site.ranges[-1]) if self.holds_experts else 1

    @property
    def holds_experts(self) -> bool:
        """True if the module holds the matrices of all experts of a layer."""
        return bool(self.parameter) and len(self.site.ranges) > 1

    @property
    def pattern_name(self) -> str:
        """The name that `rank_pattern` and `alpha_pattern` are compared with."""
        return self.parameter or self.peft_name


def list_peft_modules(model: Any, table: NameMap) -> Iterator[PeftModule]:
    """Yield every linear layer and embedding of a model, one per layer, with its module name in PEFT's files. Experts
    whose matrices are one parameter in `table` have the module that holds it."""
    mappings, sites = invert_name_map(table), find_linears(model, include_embeddings=True)
    rows = {pattern: number for number, pattern in enumerate(prefixed("", "", table))}
    num_outputs = {site.name: site.get_shape()[0] for site in sites}
    for site in sites:
        name = site.name if site.name in mappings else f"{site.name}.weight"
        if name not in mappings:
            continue
        pattern, mapping, part = mappings[name]
        part_sizes = tuple(num_outputs[part.removesuffix(".weight")] for part in mapping.parts)
        stars, is_parameter = pattern.count("*"), name != site.name
        if (is_parameter, stars) not in ((False, len(site.ranges)), (True, len(site.ranges) - 1)):
            continue  # all experts in the weight of one module, which PEFT does not know
        for index, indices in iterate_indices(site.ranges):
            path = format_path(pattern, indices[:stars])
            peft_name, parameter = (path.rpartition(".")[0], path) if is_parameter else (path, "")
            yield PeftModule(peft_name, site, index, mapping, part, part_sizes, parameter, rows[pattern])


def nest_parameters(modules: Sequence[PeftModule]) -> list[PeftModule]:
    """Return the modules as PEFT names them if each of them has an adapter. It wraps a module once per targeted
    parameter, in their order: the wrapper of the first is the `base_layer` of that of the second."""
    rows_by_holder: dict[str, set[int]] = {}
    for module in modules:
        if module.holds_experts:
            rows_by_holder.setdefault(module.peft_name, set()).add(module.row)

    def nest(module: PeftModule) -> PeftModule:
        depth = sum(row > module.row for row in rows_by_holder.get(module.peft_name, ()))
        return module._replace(peft_name=module.peft_name + ".base_layer" * depth)

    return [nest(module) if module.holds_experts else module for module in modules]


def get_name_table(model: Any, *, in_memory: bool = False) -> NameMap:
    """Return the tensor names of a model's family: those in files, or, if `in_memory`, those of the modules that
    transformers 5 builds, where all experts of a layer are one parameter. Of a language model in a multimodal
    checkpoint, names always begin as the modules of transformers 5 do."""
    origin = _resolve_module_origin(model)
    if in_memory and origin.family.memory_names is not None:
        family = dataclasses.replace(origin.family, names=origin.family.memory_names)
        origin = dataclasses.replace(origin, family=family)
    return read_name_map(origin)


def get_embedding_and_head_names(model: Any) -> tuple[str, str]:
    """Return the module names of the embedding and of the head, which need not be a module of its own here."""
    origin = _resolve_module_origin(model)
    mappings = invert_name_map(read_name_map(origin))
    embedding, _, _ = mappings.get("embedding") or mappings["embedding.weight"]
    head = rename(f"{origin.family.head}.weight", origin.wrapping)
    return embedding.removesuffix(".weight"), head.removesuffix(".weight")


def _resolve_module_origin(model: Any) -> Origin:
    """Return a model's origin; in a multimodal checkpoint with the names of the modules of transformers 5."""
    origin, _ = resolve_origin(eqx.filter_eval_shape(dequantize, strip_adapters(model)), None, {})
    if origin.wrapping is None:
        return origin
    return dataclasses.replace(origin, wrapping=name_as_modules(origin.wrapping))
