"""PEFT's methods as one table: the tensors of a module in its files, their shapes, and the adapter they are fields of.

`read.py` goes through it from files to adapters, `join.py` and `write.py` from adapters to files.
"""

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import jax.numpy as jnp
import numpy as np

from zoo.layers.embedding import AbstractEmbedding
from zoo.models.targets import get_linear_shape
from zoo.weights.safetensors import CheckpointError

from ..base import AbstractAdapter
from ..methods.adalora import RANK_EPSILON, AdaLoRA
from ..methods.dora import DoRA
from ..methods.embedding import EmbeddingLoRA
from ..methods.ia3 import IA3
from ..methods.lora import LoRA
from ..methods.lycoris import LoHa, LoKr, factorize
from ..methods.oft import OFT
from ..methods.vera import VeRA
from ..names import PeftModule
from .config import rank_from_config, scale_from_config
from .source import AdapterSource, read_floats
from .targeting import is_feedforward

Shapes = Mapping[str, tuple[int, ...]]
"""Field of an adapter -> the shape of its tensor in the file."""
_Scalars = dict[str, np.generic]


@dataclasses.dataclass(frozen=True)
class PeftTensor:
    """One array of an adapter in PEFT's format."""

    suffix: str
    field: str
    """Path of the array in the adapter."""
    has_rows: bool = False
    """True if it has one row per output, so that it is split for a fused projection. Otherwise all parts share it."""
    rank_dim: int | None = None
    """The dim of the tensor whose size is the rank."""
    added_dim: int | None = None
    """A dim of size 1 that the tensor has and the field does not."""
    transposed: bool = False
    """True if the field is the transpose of the tensor."""
    fill: float | None = 0
    """Value in a layer, or in a part of a fused module, that has no adapter. None for the value of a new adapter."""

    def get(self, adapter: Any) -> Any:
        """Return the field of an adapter."""
        return attrgetter(self.field)(adapter)

    def to_peft(self, array: np.ndarray) -> np.ndarray:
        """Return the field of one layer in the layout of the tensor."""
        if self.added_dim is not None:
            return np.expand_dims(array, self.added_dim)
        return array.T if self.transposed else array

    def from_peft(self, array: np.ndarray) -> np.ndarray:
        """Return the tensor of one layer in the layout of the field."""
        if self.added_dim is not None:
            return array.squeeze(self.added_dim)
        return array.T if self.transposed else array


def _mark_applied(source: AdapterSource, module: PeftModule) -> _Scalars:
    return {"applies": np.True_}


@dataclasses.dataclass(frozen=True)
class PeftMethod:
    """The form of one class of adapters in PEFT's files."""

    peft_type: str
    tensors: tuple[PeftTensor, ...]
    """Every tensor that a module may have. Two of one suffix are two forms of it, of which a module has one."""
    find_shapes: Callable[[AdapterSource, PeftModule], Shapes]
    """Return the shapes of the tensors that a module must have. The others must be absent."""
    shape_options: tuple[str, ...]
    """The options that the shapes follow from, for errors."""
    make: Callable[[AdapterSource, Any, Any], AbstractAdapter]
    """Make an adapter from source, base and key. Its fields are then replaced by the file's."""
    find_scalars: Callable[[AdapterSource, PeftModule], _Scalars] = _mark_applied
    """Return the fields of a layer that are not tensors, such as its scale. A layer without the adapter has zeros."""
    shared: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tensors that the file has once for all modules, by name -> their fields."""
    undivided: str = ""
    """Words for an array that cannot be split between the parts of a fused module. "" if each part can be wrapped."""
    dtype: Any = None
    """Dtype of the fields. None for the tensors' own."""

    def list_tensors(self, fields: Any) -> list[PeftTensor]:
        """List the tensors to read for a module that has these fields: of two forms of a suffix the one among them,
        and every tensor that the file must not have."""
        suffixes = {tensor.suffix for tensor in self.tensors if tensor.field in fields}
        return [tensor for tensor in self.tensors if tensor.field in fields or tensor.suffix not in suffixes]


def _find_lora_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    outputs, inputs = module.site.get_shape()
    rank = rank_from_config(source.config, module.pattern_name)
    return {"down.weight": (rank, inputs), "up.weight": (outputs, rank)}


def _find_dora_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    outputs, _ = module.site.get_shape()
    return {**_find_lora_shapes(source, module), "magnitude": (outputs,)}


def _find_embedding_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    vocab, embed = module.site.get_shape()
    rank = rank_from_config(source.config, module.pattern_name)
    return {"down": (rank, vocab), "up.weight": (embed, rank)}


def _find_lora_scalars(source: AdapterSource, module: PeftModule) -> _Scalars:
    rank = rank_from_config(source.config, module.pattern_name)
    scale = scale_from_config(source.config, module.pattern_name, rank)
    return {"rank": np.int32(rank), "scale": np.float32(scale)}


def _make_lora(source: AdapterSource, base: Any, key: Any) -> LoRA:
    name = source.adapter_name
    return LoRA(base, max_rank=1, rank=1, scale=1.0, dropout=source.dropout, adapter_name=name, key=key)


def _make_dora(source: AdapterSource, base: Any, key: Any) -> DoRA:
    name = source.adapter_name
    return DoRA(base, max_rank=1, rank=1, scale=1.0, dropout=source.dropout, adapter_name=name, key=key)


def _make_embedding_lora(source: AdapterSource, base: Any, key: Any) -> EmbeddingLoRA:
    return EmbeddingLoRA(base, max_rank=1, rank=1, scale=1.0, adapter_name=source.adapter_name, key=key)


def _find_ia3_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    outputs, inputs = module.site.get_shape()
    if is_feedforward(source.config, module.peft_name):
        return {"of_in": (1, inputs)}
    return {"of_out": (outputs, 1)}


def _make_ia3(source: AdapterSource, base: Any, key: Any) -> IA3:
    return IA3(base, inputs=False, adapter_name=source.adapter_name)


def _find_vera_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    outputs, _ = module.site.get_shape()
    return {"down_scale": (source.config["r"],), "up_scale": (outputs,)}


_VERA_SHARED = {"base_model.vera_A": "down.weight", "base_model.vera_B": "up.weight"}


def _make_vera(source: AdapterSource, base: Any, key: Any) -> VeRA:
    for name in _VERA_SHARED:
        if name not in source.tensors:
            raise CheckpointError(
                f"{source.path} has no {name}: PEFT drew it from PyTorch's generator, and saves it with "
                "save_projection=True"
            )
    down, up = (read_floats(source.tensors[name], name, source.path) for name in _VERA_SHARED)
    outputs, inputs = get_linear_shape(base)
    rank = source.config["r"]
    is_large_enough = down.ndim == up.ndim == 2 and down.shape[1] >= inputs and len(up) >= outputs
    if not is_large_enough or (len(down), up.shape[1]) != (rank, rank):
        raise CheckpointError(
            f"{source.path}: vera_A and vera_B are {list(down.shape)}, {list(up.shape)}, where r = {rank} and the "
            f"largest module are expected, {[rank, inputs]}, {[outputs, rank]} or more"
        )
    return VeRA(base, shared=(jnp.asarray(down), jnp.asarray(up)), adapter_name=source.adapter_name)


def _find_loha_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    outputs, inputs = module.site.get_shape()
    up = (outputs, source.config["r"])
    down = (source.config["r"], inputs)
    return {"up": up, "down": down, "other_up": up, "other_down": down}


def _find_lycoris_scalars(source: AdapterSource, module: PeftModule) -> _Scalars:
    scale = scale_from_config(source.config, module.peft_name, source.config["r"])
    return {"applies": np.True_, "scale": np.float32(scale)}


def _make_loha(source: AdapterSource, base: Any, key: Any) -> LoHa:
    return LoHa(base, rank=1, scale=1.0, adapter_name=source.adapter_name, key=key)


def _find_lokr_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    config = source.config
    return find_factor_shapes(
        *module.site.get_shape(), rank=config["r"], factor=config["decompose_factor"], both=config["decompose_both"]
    )


def find_factor_shapes(outputs: int, inputs: int, *, rank: int, factor: int, both: bool) -> Shapes:
    """Return the shapes of the factors that PEFT makes of a matrix for a LoKr, by field."""
    left_out, right_out = _factorize_as_peft(outputs, factor)
    left_in, right_in = _factorize_as_peft(inputs, factor)
    shapes: dict[str, tuple[int, ...]] = {}
    if both and rank < max(left_out, left_in) / 2:
        shapes["left_up"] = (left_out, rank)
        shapes["left_down"] = (rank, left_in)
    else:
        shapes["left"] = (left_out, left_in)
    if rank < max(right_out, right_in) / 2:
        shapes["right_up"] = (right_out, rank)
        shapes["right_down"] = (rank, right_in)
    else:
        shapes["right"] = (right_out, right_in)
    return shapes


def _factorize_as_peft(size: int, factor: int) -> tuple[int, int]:
    """Factor `size` into two numbers. A factor that divides it comes first, even if it is the larger one."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    return factorize(size, factor)


def _make_lokr(source: AdapterSource, base: Any, key: Any) -> LoKr:
    return LoKr(base, rank=1, scale=1.0, adapter_name=source.adapter_name, key=key)


def find_nearest_divisor(inputs: int, requested: int) -> int:
    """Return the divisor of `inputs` that is nearest to a block size or count, the smaller of two, as PEFT does."""
    if requested >= inputs:
        return inputs
    return min((n for n in range(1, inputs + 1) if inputs % n == 0), key=lambda n: (abs(n - requested), n))


def _get_block_size(source: AdapterSource, inputs: int) -> int:
    """Return the size of an OFT's blocks for a module that multiplies `inputs` numbers."""
    requested = source.config["oft_block_size"]
    if requested:
        return find_nearest_divisor(inputs, requested)
    return inputs // find_nearest_divisor(inputs, source.config["r"])


def _find_oft_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    _, inputs = module.site.get_shape()
    size = _get_block_size(source, inputs)
    pairs = size * (size - 1) // 2
    if source.config["block_share"]:
        return {"shared": (1, pairs)}
    return {"blocks": (inputs // size, pairs)}


def _make_oft(source: AdapterSource, base: Any, key: Any) -> OFT:
    _, inputs = get_linear_shape(base)
    size = _get_block_size(source, inputs)
    if source.config["use_cayley_neumann"]:
        terms = source.config["num_cayley_neumann_terms"]
    else:
        terms = None
    return OFT(base, block_size=size, neumann_terms=terms, adapter_name=source.adapter_name)


def _get_kept_rank(source: AdapterSource, module: PeftModule) -> int:
    """Return the number of ranks that an AdaLoRA of this module keeps."""
    kept = (source.config["rank_pattern"] or {}).get(f"{module.peft_name}.lora_E")
    return source.config["init_r"] if kept is None else sum(kept)


def _find_adalora_shapes(source: AdapterSource, module: PeftModule) -> Shapes:
    outputs, inputs = module.site.get_shape()
    rank = _get_kept_rank(source, module)
    return {"down.weight": (rank, inputs), "up.weight": (outputs, rank), "values": (rank, 1)}


def _find_adalora_scalars(source: AdapterSource, module: PeftModule) -> _Scalars:
    rank = _get_kept_rank(source, module)
    alpha = source.config["lora_alpha"]
    if alpha <= 0:
        alpha = rank
    scale = alpha / (source.config["init_r"] + RANK_EPSILON)
    return {"applies": np.True_, "rank": np.int32(rank), "scale": np.float32(scale)}


def _make_adalora(source: AdapterSource, base: Any, key: Any) -> AdaLoRA:
    return AdaLoRA(base, rank=1, scale=1.0, adapter_name=source.adapter_name, key=key)


_LORA_TENSORS = (
    PeftTensor("lora_A.weight", "down.weight", rank_dim=0),
    PeftTensor("lora_B.weight", "up.weight", has_rows=True, rank_dim=1),
)

METHODS: Mapping[type, PeftMethod] = {
    LoRA: PeftMethod(
        peft_type="LORA",
        tensors=_LORA_TENSORS,
        find_shapes=_find_lora_shapes,
        shape_options=("r", "rank_pattern"),
        make=_make_lora,
        find_scalars=_find_lora_scalars,
    ),
    DoRA: PeftMethod(
        peft_type="LORA",
        tensors=(*_LORA_TENSORS, PeftTensor("lora_magnitude_vector", "magnitude", has_rows=True, fill=None)),
        find_shapes=_find_dora_shapes,
        shape_options=("r", "rank_pattern", "use_dora"),
        make=_make_dora,
        find_scalars=_find_lora_scalars,
    ),
    EmbeddingLoRA: PeftMethod(
        peft_type="LORA",
        tensors=(
            PeftTensor("lora_embedding_A", "down", rank_dim=0, transposed=True),
            PeftTensor("lora_embedding_B", "up.weight", rank_dim=1),
        ),
        find_shapes=_find_embedding_shapes,
        shape_options=("r", "rank_pattern"),
        make=_make_embedding_lora,
        find_scalars=_find_lora_scalars,
    ),
    IA3: PeftMethod(
        peft_type="IA3",
        tensors=(
            PeftTensor("ia3_l", "of_out", has_rows=True, added_dim=1, fill=1.0),
            PeftTensor("ia3_l", "of_in", added_dim=0, fill=1.0),
        ),
        find_shapes=_find_ia3_shapes,
        shape_options=("feedforward_modules",),
        make=_make_ia3,
    ),
    VeRA: PeftMethod(
        peft_type="VERA",
        tensors=(
            PeftTensor("vera_lambda_d", "down_scale"),
            PeftTensor("vera_lambda_b", "up_scale", has_rows=True),
        ),
        find_shapes=_find_vera_shapes,
        shape_options=("r",),
        make=_make_vera,
        shared=_VERA_SHARED,
        undivided="VeRA's B",
        dtype=np.float32,
    ),
    LoHa: PeftMethod(
        peft_type="LOHA",
        tensors=(
            PeftTensor("hada_w1_a", "up", has_rows=True),
            PeftTensor("hada_w1_b", "down"),
            PeftTensor("hada_w2_a", "other_up", has_rows=True),
            PeftTensor("hada_w2_b", "other_down"),
        ),
        find_shapes=_find_loha_shapes,
        shape_options=("r",),
        make=_make_loha,
        find_scalars=_find_lycoris_scalars,
        dtype=np.float32,
    ),
    LoKr: PeftMethod(
        peft_type="LOKR",
        tensors=(
            PeftTensor("lokr_w1", "left"),
            PeftTensor("lokr_w1_a", "left_up"),
            PeftTensor("lokr_w1_b", "left_down"),
            PeftTensor("lokr_w2", "right"),
            PeftTensor("lokr_w2_a", "right_up"),
            PeftTensor("lokr_w2_b", "right_down"),
        ),
        find_shapes=_find_lokr_shapes,
        shape_options=("r", "decompose_factor", "decompose_both"),
        make=_make_lokr,
        find_scalars=_find_lycoris_scalars,
        undivided="a Kronecker product",
        dtype=np.float32,
    ),
    OFT: PeftMethod(
        peft_type="OFT",
        tensors=(PeftTensor("oft_R.weight", "blocks"), PeftTensor("oft_R.weight", "shared", added_dim=0)),
        find_shapes=_find_oft_shapes,
        shape_options=("r", "oft_block_size", "block_share"),
        make=_make_oft,
    ),
    AdaLoRA: PeftMethod(
        peft_type="ADALORA",
        tensors=(
            PeftTensor("lora_A", "down.weight", rank_dim=0),
            PeftTensor("lora_B", "up.weight", has_rows=True, rank_dim=1),
            PeftTensor("lora_E", "values", rank_dim=0, added_dim=1),
        ),
        find_shapes=_find_adalora_shapes,
        shape_options=("init_r", "rank_pattern"),
        make=_make_adalora,
        find_scalars=_find_adalora_scalars,
    ),
}
"""One entry per class of adapters that PEFT has."""


def get_method(adapter: AbstractAdapter) -> PeftMethod:
    """Return the form of an adapter. **Raises** `NotImplementedError` for a method that PEFT does not have."""
    for adapter_class, method in METHODS.items():
        if isinstance(adapter, adapter_class):
            return method
    raise NotImplementedError(f"{type(adapter).__name__} has no form in PEFT's files")


def select_method(config: Mapping[str, Any], layer: Any) -> PeftMethod:
    """Return the form of the adapter that a config describes for a linear layer or embedding."""
    if config["peft_type"] != "LORA":
        return next(method for method in METHODS.values() if method.peft_type == config["peft_type"])
    if isinstance(layer, AbstractEmbedding):
        return METHODS[EmbeddingLoRA]
    return METHODS[DoRA if config["use_dora"] else LoRA]


def list_peft_tensors(adapter: AbstractAdapter) -> list[PeftTensor]:
    """List the arrays of an adapter. **Raises** `NotImplementedError` for a method that PEFT does not have."""
    return [tensor for tensor in get_method(adapter).tensors if tensor.get(adapter) is not None]


def refuse_fused(method: PeftMethod, module: PeftModule, path: str) -> None:
    """**Raises** `CheckpointError` for a fused projection, several matrices here, if the method is not divided."""
    if method.undivided and module.mapping.runs > 1:
        raise CheckpointError(
            f"{path}: {module.peft_name} has its rows in another order here, and {method.undivided} is not put into it"
        )
    if method.undivided and len(module.mapping.parts) > 1:
        raise CheckpointError(
            f"{path}: {module.peft_name} holds {', '.join(module.mapping.parts)}, which are separate matrices here, "
            f"and {method.undivided} is not cut into theirs"
        )
