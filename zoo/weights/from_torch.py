"""Live PyTorch weights. The one file that imports torch and transformers, inside the functions that need them."""

import dataclasses
import importlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.models import Decoder
from zoo.models.hf.config import is_mxfp4
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Family
from zoo.parallel import Mesh

from .directory import CONFIG_NAME, find_family, read_json
from .load import read_parameters
from .resolve import resolve_checkpoint
from .safetensors import DTYPES, CheckpointError, LazyTensor


def from_torch(
    weights: Any,
    config: Any = None,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    family: Family | None = None,
    ignore: Collection[str] = (),
) -> Decoder:
    """The model whose weights a PyTorch module or state dict holds.

    - `weights`: a `torch.nn.Module` as transformers makes it, or its state dict.
    - `config`: a mapping, a transformers config, or the path of a config.json; the module's own unless given.
    - `mesh`, `dtype`, `family`, `ignore`: as `load` takes them.

    Tensors on the CPU are read where they are, through DLPack. A number of a stacked layer is moved once, to its place
    in the stack. What is not stacked, transposed or cast (embedding, head, final norm) is not copied at all: the model
    then holds PyTorch's own memory, so clone what PyTorch goes on to train.

    **Raises** `CheckpointError` as `load` does.
    """
    state = weights.state_dict() if hasattr(weights, "state_dict") else weights
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a module or a state dict was expected, not {type(weights).__name__}")
    given = _to_config_dict(getattr(weights, "config", None) if config is None else config)
    family = find_family(given, Path(CONFIG_NAME)) if family is None else family
    source = {_to_file_name(name, family): _view_torch_tensor(name, x) for name, x in state.items()}
    checkpoint = resolve_checkpoint(
        given, source, _with_memory_names(family, source), ignore, "the config: ", "what was passed"
    )
    origin = checkpoint.model.origin
    assert origin is not None  # it was understood
    model = dataclasses.replace(checkpoint.model, origin=dataclasses.replace(origin, family=family))
    return read_parameters(dataclasses.replace(checkpoint, model=model), mesh, dtype)


def _with_memory_names(family: Family, names: Collection[str]) -> Family:
    """The family, with the table by which a module's tensors are named. Before version 5 of transformers a module had
    its experts one by one, as the files have them."""
    if family.memory_names is None or any(".experts.0." in name for name in names):
        return family
    return dataclasses.replace(family, names=family.memory_names)


def _to_config_dict(source: Any) -> dict[str, Any]:
    """A config as the mapping that config.json would hold."""
    if isinstance(source, str | Path):
        path = Path(source)
        return read_json(path / CONFIG_NAME if path.is_dir() else path)
    found = source.to_dict() if hasattr(source, "to_dict") else source
    if not isinstance(found, Mapping):
        raise CheckpointError(
            "weights alone do not say how they are used: pass config=, a mapping, a transformers config, or the path "
            "of a config.json"
        )
    return json.loads(json.dumps(dict(found), default=str))


def _to_file_name(name: str, family: Family) -> str:
    """What the files call a tensor of the module."""
    for live, stored in family.memory_modules.items():
        if name.startswith(f"{live}."):
            return stored + name.removeprefix(live)
    return name


def _view_torch_tensor(name: str, x: Any) -> LazyTensor:
    import torch  # pyright: ignore[reportMissingImports]

    if not isinstance(x, torch.Tensor):
        raise CheckpointError(f"{name} is a {type(x).__name__}, where a torch.Tensor was expected")
    x = x.detach().cpu()
    if x.dtype is torch.bfloat16:  # NumPy's DLPack does not know it
        numbers = np.from_dlpack(x.view(torch.int16)).view(DTYPES["BF16"])
    else:
        numbers = np.from_dlpack(x)
    return LazyTensor(numbers.dtype, numbers.shape, lambda: numbers, zero_copy=True)


def _to_file_layout(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a module as its files name and arrange them: transformers has all experts in one since version 5."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return tensors
    return loading.revert_weight_conversion(model, tensors)


def compute_expectations(
    directory: str | Path, *, batch: int = 2, seq_len: int = 33, seed: int = 0
) -> dict[str, np.ndarray]:
    """What transformers computes of a directory, on the CPU, in the form that `parity.compare` takes: hidden states,
    logits, loss and the gradient of every parameter in float32; hidden states and logits in bfloat16.

    **Raises** `CheckpointError` where torch or transformers are not installed.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CheckpointError(
            f"{error.name} is not installed: `pip install torch transformers`, or pass a file of stored expectations"
        ) from None
    found: dict[str, Any] = {}
    family = None
    for prefix, dtype in (("", torch.float32), ("bfloat16.", torch.bfloat16)):
        options = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}
        if is_mxfp4(
            read_json(Path(directory) / CONFIG_NAME).get("quantization_config")
        ):  # to multiply it, it needs kernels
            options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), **options).eval()
        if hasattr(model, "set_experts_implementation"):  # another refuses sizes that are no multiples of its own
            model.set_experts_implementation("eager")
        family = family or FAMILIES.get(model.config.model_type)
        shape = (batch, min(seq_len, getattr(model.config, "max_position_embeddings", seq_len)))
        vocab, padding = model.config.vocab_size, getattr(model.config, "pad_token_id", None)
        tokens = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
        if padding is not None:  # PyTorch's embeddings give padding no gradient
            tokens = torch.where(tokens == padding, (padding + 1) % vocab, tokens)
        out = model(tokens, labels=tokens, output_hidden_states=True, use_cache=False)
        found |= {f"{prefix}hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
        found |= {f"{prefix}logits": out.logits}
        if not prefix:
            out.loss.backward()
            gradients = _to_file_layout(
                model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            )
            found |= {f"grad.{_to_file_name(name, family) if family else name}": x for name, x in gradients.items()}
            found |= {"input_ids": tokens, "loss": out.loss}
    return {name: (x if name == "input_ids" else x.detach().float()).numpy() for name, x in found.items()}
