"""Convert PyTorch modules and state dicts. The only file that imports torch and transformers, inside its functions."""

import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zoo._checks import parse_dtype
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import get_family
from zoo.models.hf.kinds import is_mxfp4
from zoo.models.hf.score_head import choose_head
from zoo.models.hf.spec import Family
from zoo.parallel import Mesh

from .directory import CONFIG_NAME
from .load import read_parameters
from .plan import name_in_memory, rename_module
from .resolve import LoadedModel, find_family, resolve_checkpoint
from .safetensors import DTYPES, CheckpointError, LazyTensor, hold_array, read_json


def from_torch(
    weights: Any,
    config: Any = None,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    family: Family | None = None,
    ignore: Collection[str] = (),
) -> LoadedModel:
    """Convert a PyTorch module or state dict into a model.

    - `weights`: a `torch.nn.Module`, or its state dict, with values that may also be NumPy or JAX arrays.
    - `config`: a mapping, a transformers config, or the path of a config.json. Default: the module's own.
    - `mesh`, `dtype`, `family`, `ignore`: as for `load`.

    CPU tensors and arrays are read in place, through DLPack. Each layer is copied once, into the stacked array. Tensors
    that are neither stacked, transposed nor cast (embedding, head, final norm) are not copied if their memory is
    aligned to 64 bytes: the model then shares PyTorch's memory, so clone what PyTorch continues to train.

    **Raises** `CheckpointError` as `load` does, for tensors without numbers (`meta`), and for a model that
    `torch.compile`, PEFT or a parallel module wraps.
    """
    if dtype is not None:
        dtype = parse_dtype(dtype)
    state_dict = weights.state_dict() if hasattr(weights, "state_dict") else weights
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"expected a module or a state dict, got {type(weights).__name__}")
    _refuse_wrapped(type(weights).__name__, state_dict)
    if config is None:
        config = getattr(weights, "config", None)
    config_json = read_config_json(config)
    if hasattr(weights, "state_dict"):  # as `save_pretrained` writes: its class says which head it has
        config_json["architectures"] = [type(weights).__name__]
    if family is None:
        family = find_family(config_json, Path(CONFIG_NAME))
    tensors = {rename_module(name, family.memory_modules): _view_tensor(name, x) for name, x in state_dict.items()}
    return read_state(config_json, tensors, family, mesh, dtype, ignore)


def read_state(
    config_json: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    family: Family,
    mesh: Mesh | None,
    dtype: Any,
    ignore: Collection[str] = (),
) -> LoadedModel:
    """Read the tensors of a module in memory into a model of the family."""
    try:
        family = choose_head(family, config_json)
    except ConfigError as error:
        raise CheckpointError(f"the config: {error}") from None
    checkpoint = resolve_checkpoint(
        config_json, tensors, _choose_names(family, tensors), ignore, "the config: ", "the state dict"
    )
    origin = dataclasses.replace(checkpoint.model.origin, family=family)
    model = dataclasses.replace(checkpoint.model, origin=origin)
    return read_parameters(dataclasses.replace(checkpoint, model=model), mesh, dtype)


_PEFT_ADVICE = (
    "PEFT wraps the model: pass model.merge_and_unload(), or save the adapter and read it with zoo.adapters.load"
)
_WRAPPERS = {
    r"(^|\.)_orig_mod\.": "torch.compile wraps the model: pass model._orig_mod, the module that was compiled",
    r"^base_model\.model\.|\.base_layer\.": _PEFT_ADVICE,
    r"(^|\.)_fsdp_wrapped_module\.": "FSDP wraps the model: pass its full state dict",
    r"^_forward_module\.": "Lightning Fabric wraps the model: pass model.module",
    r"^module\.": "DistributedDataParallel, or DataParallel, wraps the model: pass model.module",
}
"""Patterns of tensor names by the wrapper around the model, and what to pass instead."""


def _refuse_wrapped(kind: str, names: Iterable[str]) -> None:
    """**Raises** `CheckpointError` for tensors whose names show a wrapper around the model."""
    for name in names:
        for pattern, advice in _WRAPPERS.items():
            if re.search(pattern, str(name)):
                raise CheckpointError(f"a {kind} was passed, with a tensor {name}: {advice}")


def _choose_names(family: Family, names: Collection[str]) -> Family:
    """Return the family with the name map of a module in memory that has these names.

    Since version 5 of transformers a module in memory has all experts in one tensor, and layers of ViT and of
    Nemotron-H have other names. Before, they were as in files.
    """
    marks = (".experts.0.", ".attention.attention.", "backbone.")
    is_as_in_files = any(mark in name for name in names for mark in marks)
    return family if is_as_in_files else name_in_memory(family)


def read_config_json(source: Any) -> dict[str, Any]:
    """Return a config as the JSON object of a config.json."""
    if isinstance(source, str | Path):
        path = Path(source)
        if path.is_dir():
            path = path / CONFIG_NAME
        return read_json(path)
    config = source.to_dict() if hasattr(source, "to_dict") else source
    if not isinstance(config, Mapping):
        raise CheckpointError(
            "there is no config: pass config=, as a mapping, a transformers config, or the path of a config.json; for "
            "a module of your own, family= too (docs/tutorials/from-pytorch.md)"
        )
    return json.loads(json.dumps(dict(config), default=str))


def _view_tensor(name: str, x: Any) -> LazyTensor:
    """View a NumPy array, a JAX array, or a torch.Tensor through DLPack, without a copy if it is on the CPU."""
    if isinstance(x, np.ndarray | jax.Array):
        return hold_array(np.asarray(x), zero_copy=True)
    torch = sys.modules.get("torch")  # whoever passes a tensor has imported it
    if torch is None or not isinstance(x, torch.Tensor):
        raise CheckpointError(f"{name} is {type(x).__name__}: expected a torch.Tensor, a NumPy array or a JAX array")
    if x.is_meta:
        raise CheckpointError(
            f"{name} is on the device 'meta', which has shapes and no numbers: read the weights into the module before"
        )
    x = x.detach().cpu()
    if x.dtype is torch.bfloat16:  # NumPy's DLPack does not support it
        return hold_array(np.from_dlpack(x.view(torch.int16)).view(DTYPES["BF16"]), zero_copy=True)
    return hold_array(np.from_dlpack(x), zero_copy=True)


def _to_file_layout(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Rename and rearrange a module's tensors as in its files: transformers 5 fuses experts in memory."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return tensors
    return loading.revert_weight_conversion(model, tensors)


def compute_expectations(
    directory: str | Path, *, batch: int = 2, seq_len: int = 33, seed: int = 0
) -> dict[str, np.ndarray]:
    """Compute the expectations of `zoo.parity.compare_checkpoint` with transformers, on the CPU: hidden states, logits,
    loss and the gradient of every parameter in float32; hidden states and logits in bfloat16.

    **Raises** `CheckpointError` if torch or transformers is not installed.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CheckpointError(
            f"{error.name} is not installed: `pip install torch transformers`, or pass a file of stored expectations"
        ) from None
    results: dict[str, Any] = {}
    family = None
    for prefix, dtype in (("", torch.float32), ("bfloat16.", torch.bfloat16)):
        options = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}
        if is_mxfp4(read_json(Path(directory) / CONFIG_NAME).get("quantization_config")):  # packed needs GPU kernels
            options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), **options).eval()
        if hasattr(model, "set_experts_implementation"):  # other kernels need sizes that are multiples of theirs
            model.set_experts_implementation("eager")
        family = family or get_family(model.config.model_type)
        shape = (batch, min(seq_len, getattr(model.config, "max_position_embeddings", seq_len)))
        vocab = model.config.vocab_size
        padding = getattr(model.config, "pad_token_id", None)
        tokens = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
        if padding is not None:  # PyTorch's embeddings have no gradient at padding_idx
            tokens = torch.where(tokens == padding, (padding + 1) % vocab, tokens)
        out = model(tokens, labels=tokens, output_hidden_states=True, use_cache=False)
        results.update({f"{prefix}hidden_states.{i}": x for i, x in enumerate(out.hidden_states)})
        results[f"{prefix}logits"] = out.logits
        if not prefix:
            out.loss.backward()
            gradients = _to_file_layout(
                model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            )
            for name, gradient in gradients.items():
                if family:
                    name = rename_module(name, family.memory_modules)
                results[f"grad.{name}"] = gradient
            results["input_ids"] = tokens
            results["loss"] = out.loss
    input_ids = results.pop("input_ids").numpy()
    return {name: x.detach().float().numpy() for name, x in results.items()} | {"input_ids": input_ids}
