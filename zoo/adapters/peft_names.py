"""Where an adapter's arrays are in PEFT's files.

The names come from the family's own table: what its row does to a matrix it does to the rows of B, so that a fused
projection is cut and put together as its weight is. A is one for all parts of it, and each of ours has a copy.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import equinox as eqx

from zoo.models.facts import Row, Table
from zoo.models.names import each, fill
from zoo.weights.plan import parts_of
from zoo.weights.save import described

from .adalora import AdaLoRA
from .added import LoHa, LoKr
from .dora import DoRA
from .embedding import EmbeddingLoRA
from .ia3 import IA3
from .lora import LoRA
from .oft import OFT
from .quantise import dequantise
from .several import Adapter, plain_of
from .targets import Found, matrices
from .vera import VeRA

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
SHARED = {"base_model.vera_A": lambda vera: vera.down.weight, "base_model.vera_B": lambda vera: vera.up.weight}
"""What VeRA has once for all modules."""


ADDED = {
    "LOHA": {"hada_w1_a": "up", "hada_w1_b": "down", "hada_w2_a": "other_up", "hada_w2_b": "other_down"},
    "LOKR": {
        "lokr_w1": "left", "lokr_w1_a": "left_up", "lokr_w1_b": "left_down", "lokr_w2": "right",
        "lokr_w2_a": "right_up", "lokr_w2_b": "right_down",
    },
}  # fmt: skip
"""Method -> their word -> our field, of what is put together into one difference."""


class Field(NamedTuple):
    """One array of an adapter, as PEFT stores it."""

    suffix: str
    get: Callable[[Any], Any]
    """It, of an adapter of ours."""
    rows: bool = False
    """Whether it has a row for each output, so that of a fused projection it is cut; one that has none is the same in
    all parts of it."""
    ranks: int | None = None
    """Which of its dims counts ranks."""


def fields(adapter: Adapter) -> list[Field]:
    """The arrays of an adapter. **Raises** `NotImplementedError` for a kind that PEFT's files do not have."""
    match adapter:
        case LoRA() | DoRA():
            found = [
                Field("lora_A.weight", lambda lora: lora.down.weight, ranks=0),
                Field("lora_B.weight", lambda lora: lora.up.weight, rows=True, ranks=1),
            ]
            if isinstance(adapter, DoRA):
                found.append(Field("lora_magnitude_vector", lambda dora: dora.magnitude, rows=True))
            return found
        case EmbeddingLoRA():
            return [
                Field("lora_embedding_A", lambda lora: lora.down.swapaxes(-1, -2), ranks=0),
                Field("lora_embedding_B", lambda lora: lora.up.weight, ranks=1),
            ]
        case IA3(of_in=None):
            return [Field("ia3_l", lambda ia3: ia3.of_out[..., None], rows=True)]
        case IA3():
            return [Field("ia3_l", lambda ia3: ia3.of_in[..., None, :])]
        case VeRA():
            return [
                Field("vera_lambda_d", lambda vera: vera.down_scale),
                Field("vera_lambda_b", lambda vera: vera.up_scale, rows=True),
            ]
        case OFT(shared=None):
            return [Field("oft_R.weight", lambda oft: oft.blocks)]
        case OFT():
            return [Field("oft_R.weight", lambda oft: oft.shared[..., None, :])]
        case AdaLoRA():
            return [
                Field("lora_A", lambda one: one.down.weight, ranks=0),
                Field("lora_B", lambda one: one.up.weight, rows=True, ranks=1),
                Field("lora_E", lambda one: one.values[..., None], ranks=0),
            ]
        case LoHa() | LoKr():
            words = ADDED[type(adapter).__name__.upper()].items()
            ours = [(theirs, ours) for theirs, ours in words if getattr(adapter, ours) is not None]
            by_rows = isinstance(adapter, LoHa)
            return [Field(theirs, attrgetter(ours), rows=by_rows and theirs.endswith("_a")) for theirs, ours in ours]
    raise NotImplementedError(f"a {type(adapter).__name__} has no form in PEFT's files")


class Module(NamedTuple):
    """One of their modules and the place of ours that is in it."""

    theirs: str
    found: Found
    index: tuple[int, ...]
    row: Row
    part: int
    sizes: tuple[int, ...]
    """Outputs of every part."""


def modules(model: Any, table: Table) -> Iterator[Module]:
    """Every matrix of a model, one for each layer, with its place in PEFT's files."""
    ours, found = parts_of(table), matrices(model, tables=True)
    outputs = {one.name: one.sizes()[0] for one in found}
    for one in found:
        if one.name not in ours:
            continue
        pattern, row, part = ours[one.name]
        if pattern.count("*") < len(one.numbers):  # all experts in one tensor: PEFT has no module there
            continue
        sizes = tuple(outputs[name] for name in row.parts)
        for index, numbers in each(one.numbers):
            yield Module(fill(pattern, numbers), one, index, row, part, sizes)


def table_of(model: Any) -> Table:
    """The names of a model's tensors in its family's files, whatever adapters it has, and whatever was quantised."""
    return described(eqx.filter_eval_shape(dequantise, plain_of(model)), None, {})[1]
