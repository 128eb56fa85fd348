"""Convert a model into a PyTorch state dict. Only `to_torch` imports PyTorch, when it is called."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zoo._optional import import_optional
from zoo.layers.quantized.packed import AbstractPackedLinear
from zoo.models.decoder import Decoder
from zoo.models.encoders.heads import MaskedLMHead
from zoo.models.hf.config import read_config
from zoo.models.hf.spec import Family, Origin, prefixed
from zoo.models.hf.wrappers import TIE, name_as_modules, rename
from zoo.models.parameter_paths import walk_parameters
from zoo.models.sequence_score import SequenceScore

from .formats import split_quantization
from .plan import invert_name_map, plan_tensors
from .safetensors import CheckpointError
from .save import (
    TensorSpecs,
    export_tensors,
    is_in_host_memory,
    read_callers,
    read_name_map,
    resolve_model,
    restore_older_names,
)

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
        raise ValueError(f"names is {names!r}, where {' or '.join(map(repr, _NAMES))} was expected")
    torch = import_optional("torch", "pip install torch")
    state = list_state(model, family, names)
    tensors = {}
    for name, (shape, _) in state.specs.items():
        if name in state.whole:
            tensors[name] = torch.from_dlpack(state.whole[name]).reshape(shape)
        else:
            tensors[name] = _to_tensor(torch, state.assemble(name))
    return tensors | {copy: tensors[name] for copy, name in state.copies.items()}


@dataclasses.dataclass(frozen=True)
class StateDict:
    """The tensors of a state dict, in NumPy and JAX."""

    specs: TensorSpecs
    assemble: Callable[[str], np.ndarray]
    """Return a tensor, copied out of the model."""
    whole: Mapping[str, jax.Array]
    """Tensors that are one of the model's arrays, in the memory of the CPU."""
    copies: Mapping[str, str]
    """Further names of tensors -> their names in `specs`."""


def list_state(model: PyTree, family: str | Family | None, names: str) -> StateDict:
    """List the tensors of a model's state dict. **Raises** as `to_torch` does."""
    _refuse_packed(model)
    model, origin, _ = resolve_model(model, family)
    leaves = jax.tree.leaves(model)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        raise CheckpointError(
            "the model is sharded over several processes, and each of them would hold all of its state dict: zoo.save "
            "writes it as files, one tensor at a time"
        )
    files = origin
    if names == "module":
        origin = _with_module_names(files, has_head=isinstance(model, Decoder | SequenceScore))
    name_map = read_name_map(origin)
    specs, assemble = export_tensors(model, name_map)
    specs = {name: spec for name, spec in specs.items() if name not in origin.lacking}
    whole = {}
    for name, plan in plan_tensors(model, name_map).items():
        leaf = leaves[plan.slices[0].leaf]
        is_one_array = plan.mapping.keeps_rows and not plan.mapping.transposed and not plan.slices[0].index
        if is_one_array and is_in_host_memory(leaf):
            whole[name] = leaf
    if names == "files":
        specs, assemble = restore_older_names(specs, assemble, origin)
        return StateDict(specs, assemble, whole, {})
    copies = _list_calls(origin, specs) | _list_tied_head(model, files, origin, specs)
    return _rename(StateDict(specs, assemble, whole, copies), origin.family.memory_modules)


def _refuse_packed(model: PyTree) -> None:
    """**Raises** `CheckpointError` for a model with packed matrices."""
    is_packed = lambda node: isinstance(node, AbstractPackedLinear)
    nodes = jax.tree.leaves(model, is_leaf=is_packed)
    paths = walk_parameters(model, "", (), is_packed)
    for (name, _), node in zip(paths, nodes, strict=True):
        if is_packed(node):
            raise CheckpointError(
                f"{name} is packed, and a state dict holds plain tensors: pass zoo.adapters.dequantize(model), or load "
                "without packed=True"
            )


def _with_module_names(origin: Origin, *, has_head: bool) -> Origin:
    """Return an origin with the names of modules in memory, whatever the names in its files are. Beside the head of a
    decoder, or a score, the other modules have the base model's prefix."""
    family = origin.family
    if family.memory_names is not None:
        family = dataclasses.replace(family, names=family.memory_names)
    wrapping = origin.wrapping
    if wrapping is not None:
        wrapping = name_as_modules(wrapping)
    lacks_base_prefix = origin.lacks_base_prefix and not has_head
    return dataclasses.replace(origin, family=family, wrapping=wrapping, lacks_base_prefix=lacks_base_prefix)


def _list_calls(origin: Origin, specs: TensorSpecs) -> dict[str, str]:
    """Return the names of the tensors of shared modules in each later layer that calls one -> in the first."""
    copies = {}
    for other, first in read_callers(origin).items():
        for name in specs:
            if name.startswith(f"{first}."):
                copies[other + name.removeprefix(first)] = name
    return copies


def _list_tied_head(model: PyTree, files: Origin, origin: Origin, specs: TensorSpecs) -> dict[str, str]:
    """Return the names of a tied head's matrix and bias -> of the tensors that they are; {} without a tied head."""
    family = origin.family
    config = read_config(family, split_quantization(json.loads(origin.config))[0])
    head = rename(family.head, origin.wrapping)
    outer = head.rpartition(".")[0]
    has_head = isinstance(model, Decoder) or isinstance(getattr(model, "head", None), MaskedLMHead)
    is_tied = config.get(TIE, family.required_values.get(TIE) == (True,))
    if not (is_tied and has_head) or f"{head}.weight" in specs:
        return {}
    if outer and not any(name.startswith(f"{outer}.") for name in specs):  # the tied head of DeBERTa v3 has no matrix
        return {}
    # by our name: in memory, the embedding may have another name than in files
    part = prefixed("", "", files.family.names(config))[family.embedding].parts[0]
    embedding = invert_name_map(read_name_map(origin))[part][0]
    copies = {f"{head}.weight": f"{embedding}.weight"}
    if f"{outer}.bias" in specs:  # BERT's module has the bias twice: in the head, and in the linear layer inside
        copies[f"{head}.bias"] = f"{outer}.bias"
    return copies


def _rename(state: StateDict, memory_modules: Mapping[str, str]) -> StateDict:
    """Name tensors as modules in memory do, where files have other names for whole modules."""

    def to_memory_name(name: str) -> str:
        for memory_name, file_name in memory_modules.items():
            if name.startswith(f"{file_name}."):
                return memory_name + name.removeprefix(file_name)
        return name

    file_names = {to_memory_name(name): name for name in state.specs}
    return StateDict(
        {name: state.specs[file_name] for name, file_name in file_names.items()},
        lambda name: state.assemble(file_names[name]),
        {to_memory_name(name): array for name, array in state.whole.items()},
        {to_memory_name(copy): to_memory_name(name) for copy, name in state.copies.items()},
    )


def _to_tensor(torch: Any, array: np.ndarray) -> Any:
    """Return an array of NumPy as a tensor that shares its memory."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    # dtypes of ml_dtypes, which PyTorch's converter does not know
    bits = np.dtype(f"int{8 * array.dtype.itemsize}")
    return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
