"""PEFT's files of virtual tokens, keys and values or embeddings, and the trained rows of an embedding in others."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zoo.models import Decoder
from zoo.models.parameter_paths import list_modules
from zoo.weights.safetensors import CheckpointError, LazyTensor

from ..methods.state import LayerValues, StateBlock, add_state, make_initial_values
from ..methods.token_rows import TokenRows, wrap_embedding
from ..names import get_embedding_and_head_names
from .source import PREFIX, read_floats
from .targeting import is_targeted

_Model = TypeVar("_Model")
_TENSOR = "prompt_embeddings"


def read_prompt(
    model: _Model, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], path: str, adapter_name: str
) -> _Model:
    """Read virtual tokens. **Raises** `CheckpointError` for other tensors, another shape than the model's, and for keys
    and values for a model with other layers than attention with them."""
    if list(tensors) != [_TENSOR] or not isinstance(model, Decoder):
        raise CheckpointError(f"{path} has {', '.join(sorted(tensors))}: {_TENSOR} is read, for a Decoder")
    array = read_floats(tensors[_TENSOR], _TENSOR, path)
    length = config["num_virtual_tokens"]
    if config["peft_type"] in ("PROMPT_TUNING", "P_TUNING"):
        _check_token_rows(model, path, array, length)
        _refuse_multiplier(model)
        return wrap_embedding(model, lambda _: array, length, adapter_name)
    try:
        layers = make_initial_values(model, length, None, jax.random.key(0))
    except (ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: {error}") from None
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
    nodes = zip(_list_layer_blocks(model), _list_layer_blocks(model if tree is None else tree), strict=True)
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
    blocks = _list_layer_blocks(model)
    _, _, block = blocks[0]
    heads, size = block.values[0].array.shape[2:]
    config = {
        "num_virtual_tokens": block.length,
        "num_layers": sum(len(ranges[0]) for _, ranges, _ in blocks),
        "num_attention_heads": heads,
        "token_dim": heads * size,
        "num_transformer_submodules": 1,
    }
    if (frozen := block.values[0].frozen) is not None:
        return {"peft_type": "CARTRIDGE", "num_frozen_tokens": frozen.shape[1], **config}
    return {"peft_type": "PREFIX_TUNING", "prefix_projection": False, "encoder_hidden_size": heads * size, **config}


def _check_token_rows(model: Any, path: str, array: np.ndarray, count: int) -> None:
    _, embed = model.embedding.table_shape
    if array.shape != (count, embed):
        raise CheckpointError(f"{path}: the rows of tokens are {list(array.shape)}, expected {[count, embed]}")


def _refuse_multiplier(model: Any) -> None:
    if model.embedding.multiplier != 1:
        raise CheckpointError(f"PEFT does not multiply virtual tokens, and the model by {model.embedding.multiplier}")


def take_token_rows(
    model: Any, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], path: str
) -> tuple[tuple[list[int], np.ndarray] | None, dict[str, LazyTensor]]:
    """Return the token ids and trained rows of the embedding, if the adapter has any, and the other tensors. **Raises**
    `CheckpointError` for rows of another module, ids outside of the vocabulary or repeated, and missing rows."""
    tensors = dict(tensors)
    is_whole = config["peft_type"] == "TRAINABLE_TOKENS"
    ids = config.get("token_indices" if is_whole else "trainable_token_indices")
    if not ids and not is_whole:
        return None, tensors
    name, _ = get_embedding_and_head_names(model)
    is_meant = not is_whole or is_targeted(config, name, in_all_linear=False)
    if isinstance(ids, Mapping):
        is_meant = len(ids) == 1 and f".{name}".endswith(f".{next(iter(ids))}")
        ids = next(iter(ids.values()))
    model = getattr(model, "decoder", model)
    vocab = model.embedding.table_shape[0] if isinstance(model, Decoder) else 0
    if not is_meant or not ids or len({*ids}) < len(ids) or max(ids) >= vocab:
        raise CheckpointError(f"{path}: trained rows are read of {name}, with different ids below {vocab}")
    tensor_name = _name_rows(name, is_whole)
    if tensor_name not in tensors or (is_whole and len(tensors) > 1):
        raise CheckpointError(f"{path} has {', '.join(sorted(tensors)[:3])}: expected {tensor_name}")
    array = read_floats(tensors.pop(tensor_name), tensor_name, path)
    _check_token_rows(model, path, array, len(ids))
    return (ids, array), tensors


def _name_rows(embedding: str, is_whole: bool) -> str:
    return f"{PREFIX}{embedding}.{'' if is_whole else 'token_adapter.'}trainable_tokens_delta"


def find_token_rows(tree: Any, adapter_name: str) -> TokenRows | None:
    """Return the trained rows of the embedding that have this name, or None."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, TokenRows))
    return next((x for x in nodes if isinstance(x, TokenRows) and x.adapter_name == adapter_name), None)


def collect_token_rows(model: Any, rows: TokenRows, tree: Any, *, is_whole: bool) -> dict[str, np.ndarray]:
    """Return trained rows, or their gradients in `tree`, by the name of their tensor. `is_whole`: the adapter has
    nothing else."""
    if rows.strength != 1:
        raise CheckpointError(f"{rows.adapter_name!r}: PEFT's files of token rows hold no strength: save it at 1")
    if not rows.num_virtual:
        return {_name_rows(get_embedding_and_head_names(model)[0], is_whole): np.asarray(tree.rows)}
    if not is_whole:
        raise CheckpointError(f"{rows.adapter_name!r} has virtual tokens and more, which no file of PEFT's has")
    _refuse_multiplier(model)
    return {_TENSOR: np.asarray(tree.rows)}


def build_rows_config(model: Any, rows: TokenRows) -> dict[str, Any]:
    """Build the options of an adapter of trained rows only in PEFT's config."""
    if rows.num_virtual:
        return {
            "peft_type": "PROMPT_TUNING",
            "num_virtual_tokens": rows.num_virtual,
            "token_dim": rows.rows.shape[1],
            "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM",
        }
    target = get_embedding_and_head_names(model)[0]
    return {"peft_type": "TRAINABLE_TOKENS", "token_indices": rows.ids.tolist(), "target_modules": [target]}


def _list_layer_blocks(model: Any) -> list[tuple[str, Any, StateBlock]]:
    return list_modules(model, lambda node: isinstance(node, StateBlock))
