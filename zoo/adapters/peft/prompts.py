"""PEFT's files of virtual tokens: one tensor, `prompt_embeddings`, with the keys and values of a prefix."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zoo.models import Decoder
from zoo.models.parameter_paths import list_modules
from zoo.weights.safetensors import CheckpointError, LazyTensor

from ..methods.state import LayerValues, StateBlock, add_state, make_initial_values
from .source import read_floats

_Model = TypeVar("_Model")
_TENSOR = "prompt_embeddings"


def read_prompt(
    model: _Model, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], path: str, adapter_name: str
) -> _Model:
    """Read virtual tokens. **Raises** `CheckpointError` for other tensors, another shape than the model's, and for a
    model with other layers than attention with keys and values."""
    if list(tensors) != [_TENSOR] or not isinstance(model, Decoder):
        raise CheckpointError(f"{path} has {', '.join(sorted(tensors))}: {_TENSOR} is read, for a Decoder")
    array = read_floats(tensors[_TENSOR], _TENSOR, path)
    length = config["num_virtual_tokens"]
    layers = make_initial_values(model, length, None, jax.random.key(0))
    shape = (length, len(layers), 2, *_get_shape(layers))
    if array.shape != (length, np.prod(shape[1:])):
        raise CheckpointError(
            f"{path}: {_TENSOR} is {list(array.shape)}, where num_virtual_tokens = {length} and the model has "
            f"{len(layers)} layers with keys and values of {list(shape[3:])}"
        )
    array = jnp.asarray(array).reshape(shape)
    layers = [[(array[:, n, i], dims) for i, (_, dims) in enumerate(values)] for n, values in enumerate(layers)]
    return add_state(model, layers, length, config.get("num_frozen_tokens", 0), adapter_name)


def _get_shape(layers: list[LayerValues]) -> tuple[int, ...]:
    """Return KV heads and features of each, of all keys and values."""
    shapes = [[x.shape[1:] for x, _ in values] for values in layers]
    if any(found != shapes[0][:1] * 2 or len(found[0]) != 2 for found in shapes):
        raise CheckpointError("PEFT's files of a prefix have keys and values, of one shape in every layer")
    return shapes[0][0]


def collect_prompt(model: Any, tree: Any) -> dict[str, np.ndarray]:
    """Return a trained state by its tensor's name in PEFT's files, or the gradients `tree`: 0 for frozen tokens."""
    layers: dict[int, Any] = {}
    nodes = zip(_list_blocks(model), _list_blocks(model if tree is None else tree), strict=True)
    for (_, ranges, block), (_, _, values) in nodes:
        for i, number in enumerate(ranges[0]):
            layers[number] = []
            for own, x in zip(block.values, values.values, strict=True):
                frozen = own.array[i][:0] if own.frozen is None else own.frozen[i] * (tree is None)
                layers[number].append((np.concatenate([frozen, x.array[i]]), own.array_dims))
    ordered = [layers[number] for number in sorted(layers)]
    shape = _get_shape(ordered)
    array = np.stack([np.stack([x for x, _ in values], 1) for values in ordered], 1)
    return {_TENSOR: array.reshape(-1, len(ordered) * 2 * shape[0] * shape[1])}


def build_prompt_config(model: Any) -> dict[str, Any]:
    """Build the options of a trained state in PEFT's config."""
    blocks = _list_blocks(model)
    _, _, block = blocks[0]
    heads, size = block.values[0].array.shape[2:]
    config = {
        "num_virtual_tokens": block.length, "num_layers": sum(len(ranges[0]) for _, ranges, _ in blocks),
        "num_attention_heads": heads, "token_dim": heads * size, "num_transformer_submodules": 1,
    }  # fmt: skip
    if (frozen := block.values[0].frozen) is not None:
        return {"peft_type": "CARTRIDGE", "num_frozen_tokens": frozen.shape[1], **config}
    return {"peft_type": "PREFIX_TUNING", "prefix_projection": False, "encoder_hidden_size": heads * size, **config}


def _list_blocks(model: Any) -> list[tuple[str, Any, StateBlock]]:
    return list_modules(model, lambda node: isinstance(node, StateBlock))
