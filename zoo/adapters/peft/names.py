"""Where an adapter's arrays are in PEFT's files.

The names come from the family's own table: what its row does to a matrix it does to the rows of B, so that a fused
projection is cut and put together as its weight is. A is one for all parts of it, and each of ours has a copy.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import equinox as eqx

from zoo.models.hf.spec import NameMap, TensorMapping
from zoo.models.parameter_paths import format_path, iterate_indices
from zoo.weights.plan import invert_name_map
from zoo.weights.save import resolve_origin

from ..compose import Adapter, strip_adapters
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
"""What VeRA has once for all modules."""


LYCORIS_FIELDS = {
    "LOHA": {"hada_w1_a": "up", "hada_w1_b": "down", "hada_w2_a": "other_up", "hada_w2_b": "other_down"},
    "LOKR": {
        "lokr_w1": "left", "lokr_w1_a": "left_up", "lokr_w1_b": "left_down", "lokr_w2": "right",
        "lokr_w2_a": "right_up", "lokr_w2_b": "right_down",
    },
}  # fmt: skip
"""Method -> their word -> our field, of what is put together into one difference."""


class PeftTensor(NamedTuple):
    """One array of an adapter, as PEFT stores it."""

    suffix: str
    get: Callable[[Any], Any]
    """It, of an adapter of ours."""
    has_rows: bool = False
    """Whether it has a row for each output, so that of a fused projection it is cut; one that has none is the same in
    all parts of it."""
    rank_dim: int | None = None
    """Which of its dims counts ranks."""


def list_peft_tensors(adapter: Adapter) -> list[PeftTensor]:
    """The arrays of an adapter. **Raises** `NotImplementedError` for a kind that PEFT's files do not have."""
    match adapter:
        case LoRA() | DoRA():
            found = [
                PeftTensor("lora_A.weight", lambda lora: lora.down.weight, rank_dim=0),
                PeftTensor("lora_B.weight", lambda lora: lora.up.weight, has_rows=True, rank_dim=1),
            ]
            if isinstance(adapter, DoRA):
                found.append(PeftTensor("lora_magnitude_vector", lambda dora: dora.magnitude, has_rows=True))
            return found
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
                PeftTensor("lora_A", lambda one: one.down.weight, rank_dim=0),
                PeftTensor("lora_B", lambda one: one.up.weight, has_rows=True, rank_dim=1),
                PeftTensor("lora_E", lambda one: one.values[..., None], rank_dim=0),
            ]
        case LoHa() | LoKr():
            words = LYCORIS_FIELDS[type(adapter).__name__.upper()].items()
            ours = [(theirs, ours) for theirs, ours in words if getattr(adapter, ours) is not None]
            by_rows = isinstance(adapter, LoHa)
            return [
                PeftTensor(theirs, attrgetter(ours), has_rows=by_rows and theirs.endswith("_a"))
                for theirs, ours in ours
            ]
    raise NotImplementedError(f"a {type(adapter).__name__} has no form in PEFT's files")


class PeftModule(NamedTuple):
    """One of their modules and the place of ours that is in it."""

    peft_name: str
    site: LinearSite
    index: tuple[int, ...]
    mapping: TensorMapping
    part: int
    part_sizes: tuple[int, ...]
    """Outputs of every part."""


def list_peft_modules(model: Any, table: NameMap) -> Iterator[PeftModule]:
    """Every matrix of a model, one for each layer, with its place in PEFT's files."""
    ours, found = invert_name_map(table), find_linears(model, include_embeddings=True)
    outputs = {one.name: one.sizes()[0] for one in found}
    for one in found:
        if one.name not in ours:
            continue
        pattern, row, part = ours[one.name]
        if pattern.count("*") < len(one.numbers):  # all experts in one tensor: PEFT has no module there
            continue
        sizes = tuple(outputs[name] for name in row.parts)
        for index, numbers in iterate_indices(one.numbers):
            yield PeftModule(format_path(pattern, numbers), one, index, row, part, sizes)


def get_name_table(model: Any) -> NameMap:
    """The names of a model's tensors in its family's files, whatever adapters it has, and whatever was quantized."""
    return resolve_origin(eqx.filter_eval_shape(dequantize, strip_adapters(model)), None, {})[1]
