"""Convert a model into a PyTorch state dict. Only `to_torch` imports PyTorch, when it is called."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zoo._optional import import_optional
from zoo.layers.quantized.packed import AbstractPackedLinear
from zoo.models.decoder import Decoder
from zoo.models.encoders.heads import MaskedLMHead
from zoo.models.hf.spec import Family, Origin, prefixed
from zoo.models.hf.wrappers import TIE, name_as_modules, rename
from zoo.models.parameter_paths import list_modules
from zoo.models.sequence_score import SequenceScore

from .plan import invert_name_map, list_copies, name_in_memory, plan_tensors, rename_module
from .safetensors import CheckpointError, LazyTensor
from .save import export_tensors, is_in_host_memory, resolve_model
from .stages import Stored, drop_lacking, read_callers, read_name_map, read_written_config, restore_older

_NAMES = ("module", "files")


def to_torch(model: PyTree, family: str | Family | None = None, *, names: str = "module") -> dict[str, Any]:
    """Convert a model into a PyTorch state dict of its family: tensor names -> CPU tensors.

        theirs = transformers.AutoModelForCausalLM.from_config(config)
        theirs.load_state_dict(zoo.to_torch(model))

    - `family`: as for `save`.
    - `names`: "module" for names and shapes of transformers 5 in memory, where all experts of a layer are one tensor;
      "files" for names that `save` writes, which older versions and other libraries read.

    Modules name a tied head although it has no matrix of its own: `lm_head.weight` is then the embedding's tensor, as
    `load_state_dict(strict=True)` expects. Files leave it out. Modules that several layers call are repeated likewise.

    On one CPU, an array that is one tensor of the family (embedding, untied head, final norm) is not copied: the tensor
    has its memory, through DLPack. Writing to it changes the model, so clone what PyTorch will train. Layers are
    stacked here, so their tensors are copies, and so are all that are transposed, fused, sharded or on another device.

    **Raises** `ImportError` without PyTorch; `CheckpointError` for packed matrices and adapters, and for a model that
    is sharded over several processes; `ValueError` for edits; `NoFamilyError` as `save` does.
    """
    if names not in _NAMES:
        raise ValueError(f"names is {names!r}: expected {' or '.join(map(repr, _NAMES))}")
    torch = import_optional("torch", "pip install torch")
    state = list_state(model, family, names)
    tensors = {}
    for name, tensor in state.tensors.items():
        if name in state.whole:
            tensors[name] = torch.from_dlpack(state.whole[name]).reshape(tensor.shape)
        else:
            tensors[name] = _to_tensor(torch, tensor.read())
    return tensors | {copy: tensors[name] for copy, name in state.copies.items()}


@dataclasses.dataclass(frozen=True)
class StateDict:
    """The tensors of a state dict, in NumPy and JAX."""

    tensors: Mapping[str, LazyTensor]
    """Copied out of the model when they are read."""
    whole: Mapping[str, jax.Array]
    """Tensors that are one of the model's arrays, in the memory of the CPU."""
    copies: Mapping[str, str]
    """Further names of tensors -> their names in `tensors`."""


def list_state(model: PyTree, family: str | Family | None, names: str) -> StateDict:
    """List the tensors of a model's state dict. **Raises** as `to_torch` does."""
    _refuse_packed(model)
    model, files = resolve_model(model, family)
    leaves = jax.tree.leaves(model)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        raise CheckpointError(
            "the model is sharded over several processes, and each of them would hold all of its state dict: zoo.save "
            "writes it as files, one tensor at a time"
        )
    origin = files
    if names == "module":
        origin = _with_module_names(files, has_head=isinstance(model, Decoder | SequenceScore))
    name_map = read_name_map(origin)
    stored = drop_lacking(Stored({}, export_tensors(model, name_map), origin))
    whole = {}
    for name, plan in plan_tensors(model, name_map).items():
        leaf = leaves[plan.slices[0].leaf]
        is_one_array = plan.mapping.keeps_rows and not plan.mapping.transposed and not plan.slices[0].index
        if is_one_array and is_in_host_memory(leaf):
            whole[name] = leaf
    if names == "files":
        return StateDict(restore_older(stored).tensors, whole, {})
    calls = list_copies(stored.tensors, read_callers(origin))
    copies = calls | _list_tied_head(model, files, origin, stored.tensors)
    return _rename(StateDict(stored.tensors, whole, copies), origin.family.memory_modules)


def _refuse_packed(model: PyTree) -> None:
    """**Raises** `CheckpointError` for a model with packed matrices."""
    is_packed = lambda node: isinstance(node, AbstractPackedLinear)
    for name, _, _ in list_modules(model, is_packed):
        raise CheckpointError(
            f"{name} is packed, and a state dict holds plain tensors: pass zoo.adapters.dequantize(model), or load "
            "without packed=True"
        )


def _with_module_names(origin: Origin, *, has_head: bool) -> Origin:
    """Return an origin with the names of modules in memory, whatever the names in its files are. Beside the head of a
    decoder, or a score, the other modules have the base model's prefix."""
    family = name_in_memory(origin.family)
    wrapping = None if origin.wrapping is None else name_as_modules(origin.wrapping)
    lacks_base_prefix = origin.lacks_base_prefix and not has_head
    return dataclasses.replace(origin, family=family, wrapping=wrapping, lacks_base_prefix=lacks_base_prefix)


def _list_tied_head(model: PyTree, files: Origin, origin: Origin, tensors: Collection[str]) -> dict[str, str]:
    """Return the names of a tied head's matrix and bias -> of the tensors that they are; {} without a tied head."""
    family = origin.family
    config = read_written_config(origin)
    head = rename(family.head, origin.wrapping)
    outer = head.rpartition(".")[0]
    has_head = isinstance(model, Decoder) or isinstance(getattr(model, "head", None), MaskedLMHead)
    is_tied = config.get(TIE, family.required_values.get(TIE) == (True,))
    if not (is_tied and has_head) or f"{head}.weight" in tensors:
        return {}
    if outer and not any(name.startswith(f"{outer}.") for name in tensors):  # the tied head of DeBERTa v3 has no matrix
        return {}
    # by our name: in memory, the embedding may have another name than in files
    part = prefixed("", "", files.family.names(config))[family.embedding].parts[0]
    embedding = invert_name_map(read_name_map(origin))[part][0]
    copies = {f"{head}.weight": f"{embedding}.weight"}
    if f"{outer}.bias" in tensors:  # BERT's module has the bias twice: in the head, and in the linear layer inside
        copies[f"{head}.bias"] = f"{outer}.bias"
    return copies


def _rename(state: StateDict, memory_modules: Mapping[str, str]) -> StateDict:
    """Name tensors as modules in memory do, where files have other names for whole modules."""
    in_memory = {file_name: memory_name for memory_name, file_name in memory_modules.items()}
    return StateDict(
        {rename_module(name, in_memory): tensor for name, tensor in state.tensors.items()},
        {rename_module(name, in_memory): array for name, array in state.whole.items()},
        {rename_module(copy, in_memory): rename_module(name, in_memory) for copy, name in state.copies.items()},
    )


def _to_tensor(torch: Any, array: np.ndarray) -> Any:
    """Return an array of NumPy as a tensor that shares its memory."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    # dtypes of ml_dtypes, which PyTorch's converter does not know
    bits = np.dtype(f"int{8 * array.dtype.itemsize}")
    return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
