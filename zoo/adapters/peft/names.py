"""Map an adapter's arrays to tensor names in PEFT's files.

The module names come from the name table of the model family. For a fused projection, the rows of B are split and
concatenated as the rows of its weight are. All parts share one A in the file; here each part has a copy.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import equinox as eqx

from zoo.models.hf.spec import NameMap, TensorMapping
from zoo.models.parameter_paths import format_path, iterate_indices
from zoo.weights.plan import invert_name_map
from zoo.weights.save import resolve_origin

from ..base import AbstractAdapter
from ..compose import strip_adapters
from ..methods.adalora import AdaLoRA
from ..methods.dora import DoRA
from ..methods.embedding import EmbeddingLoRA
from ..methods.ia3 import IA3
from ..methods.lora import LoRA
from ..methods.lycoris import LoHa, LoKr
from ..methods.oft import OFT
from ..methods.vera import VeRA
from ..quantize import dequantize
from ..targets import LinearSite, find_linears

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
VERA_SHARED = {"base_model.vera_A": lambda vera: vera.down.weight, "base_model.vera_B": lambda vera: vera.up.weight}
"""Tensors that VeRA stores once for all modules."""

LYCORIS_FIELDS = {
    "LOHA": {"hada_w1_a": "up", "hada_w1_b": "down", "hada_w2_a": "other_up", "hada_w2_b": "other_down"},
    "LOKR": {
        "lokr_w1": "left", "lokr_w1_a": "left_up", "lokr_w1_b": "left_down", "lokr_w2": "right",
        "lokr_w2_a": "right_up", "lokr_w2_b": "right_down",
    },
}  # fmt: skip
"""For LyCORIS methods: PEFT's tensor suffix -> our field."""


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
    raise NotImplementedError(f"a {type(adapter).__name__} has no form in PEFT's files")


class PeftModule(NamedTuple):
    """A module in PEFT's naming, and our layer that it holds, or that is one part of it if the module is fused."""

    peft_name: str
    site: LinearSite
    index: tuple[int, ...]
    mapping: TensorMapping
    part: int
    part_sizes: tuple[int, ...]
    """Number of outputs of each part."""


def list_peft_modules(model: Any, table: NameMap) -> Iterator[PeftModule]:
    """Yield every linear layer and embedding of a model, one per layer, with its module name in PEFT's files."""
    mappings, sites = invert_name_map(table), find_linears(model, include_embeddings=True)
    num_outputs = {site.name: site.get_shape()[0] for site in sites}
    for site in sites:
        if site.name not in mappings:
            continue
        pattern, mapping, part = mappings[site.name]
        if pattern.count("*") < len(site.ranges):  # all experts in one tensor: PEFT has no module there
            continue
        part_sizes = tuple(num_outputs[name] for name in mapping.parts)
        for index, indices in iterate_indices(site.ranges):
            yield PeftModule(format_path(pattern, indices), site, index, mapping, part, part_sizes)


def get_name_table(model: Any) -> NameMap:
    """Return the tensor names of a model's family, ignoring adapters and quantization."""
    return resolve_origin(eqx.filter_eval_shape(dequantize, strip_adapters(model)), None, {})[1]
