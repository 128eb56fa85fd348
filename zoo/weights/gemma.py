"""Read Gemma's own JAX parameters (google-deepmind/gemma) into its families here, and write them back.

Names of a tree, and the shapes of their arrays (`gemma/gm/nn/_modules.py` there):

    embedder/input_embedding              vocab embed
    layer_N/attn/q_einsum/w               heads embed head_dim
    layer_N/attn/kv_einsum/w              2 kv_heads embed head_dim
    layer_N/attn/qkv_einsum/w             3 heads embed head_dim, for both if heads share no keys
    layer_N/attn/attn_vec_einsum/w        heads head_dim embed
    layer_N/attn/_query_norm/scale        head_dim, and _key_norm
    layer_N/mlp/gating_einsum             2 mlp embed, or 2 embed mlp: of the gate and of what it multiplies
    layer_N/mlp/linear                    mlp embed
    layer_N/pre_attention_norm/scale      embed, and post_attention_norm, pre_ffw_norm, post_ffw_norm
    final_norm/scale                      embed

Published files begin all names with `transformer/` and have `mlp/linear/w`; names of a training state begin with
`params/`.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from zoo._checks import parse_dtype
from zoo.models.hf.spec import Shape
from zoo.models.hf.wrappers import TEXT_CONFIG, read_text_config
from zoo.parallel import Mesh

from .directory import CONFIG_NAME
from .from_torch import read_config_json, read_state
from .jax_files import read_orbax
from .nested import fill_like, flatten
from .resolve import LoadedModel, find_family
from .safetensors import CheckpointError, LazyTensor
from .save import export_tensors, resolve_model
from .stages import read_name_map

_SANDWICH_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS: Mapping[str, Mapping[str, str]] = {
    "gemma": {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"},
    "gemma2": _SANDWICH_NORMS,
    "gemma3_text": _SANDWICH_NORMS,
}
"""Norms of a layer by family: names in Gemma's tree -> in transformers."""
_GATINGS = ("mlp embed", "embed mlp")
_BESIDE = re.compile(r"(vision_encoder|SigLiPFromPatches_0|audio_encoder)/|embedder/(mm|audio)_")
"""Names of the parts of multimodal trees that the language model does not use."""


def from_gemma(
    tree: Mapping[str, Any] | str | Path,
    config: Any,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    gating: str | None = None,
) -> LoadedModel:
    """Convert the JAX parameters of Gemma, Gemma 2 or Gemma 3 into a model, as of the same checkpoint in transformers.

    - `tree`: nested or flat dicts of arrays; or the folder in which Orbax saved them.
    - `config`: the checkpoint's config.json, as a path or a mapping, or a transformers config. Sizes may be missing:
      the tree has them. `{"model_type": "gemma"}` is enough for the first Gemma.
    - `mesh`, `dtype`: as for `load`.
    - `gating`: "mlp embed" or "embed mlp", the dims of a matrix of `gating_einsum`. It is needed only if both have the
      same size; otherwise shapes tell.

    Matrices are rearranged one at a time. Vision and audio encoders are left aside: `to_gemma` writes them back.

    **Raises** `CheckpointError` for another family, for a name that has no place, for a config without what no tree
    shows and the sizes of Gemma differ in (window and RoPE of Gemma 3; the scale of scores if heads are not 256 wide),
    and as `load` does.
    """
    if dtype is not None:
        dtype = parse_dtype(dtype)
    if isinstance(tree, str | Path):
        tree = read_orbax(tree)
    config_json = read_config_json(config)
    if TEXT_CONFIG in config_json:
        config_json = read_text_config(config_json)
    family = find_family(config_json, Path(CONFIG_NAME))
    _check_family(family.name)
    arrays = {name: x for name, x in flatten(tree) if not _BESIDE.match(_strip_name(name))}
    sizes = _read_sizes({_strip_name(name): x.shape for name, x in arrays.items()})
    _check_config(config_json, family.name, sizes["head_dim"], family.defaults)
    tensors = {}
    for name, x in arrays.items():
        target = _find_target(name, x.shape, family.name, sizes, gating)
        parts = x if target.is_stacked else [x]
        for tensor, part in zip(target.tensors, parts, strict=True):
            read = partial(_to_matrix, part, target.kind)
            tensors[tensor] = LazyTensor(x.dtype, _get_matrix_shape(part.shape, target.kind), read)
    return read_state({**sizes, **config_json}, tensors, family, mesh, dtype)


def to_gemma(model: PyTree, like: Mapping[str, Any], *, gating: str | None = None) -> dict[str, Any]:
    """Convert a Gemma, Gemma 2 or Gemma 3 into Gemma's JAX parameters, in NumPy. The inverse of `from_gemma`.

    - `like`: a tree with the names and shapes to write: the tree that was read, or shapes of the package's `init`. The
      model's arrays replace its own; vision and audio encoders remain as they are.
    - `gating`: as for `from_gemma`.

    What `from_gemma` read without a cast is written back bit for bit.

    **Raises** `CheckpointError` for another family, and for a tree with other names or shapes; as `save` does for
    adapters and edits.
    """
    model, origin = resolve_model(model)
    _check_family(origin.family.name)
    tensors = export_tensors(model, read_name_map(origin))
    base = "" if origin.lacks_base_prefix else "model."
    shapes = {name: np.shape(x) for name, x in flatten(like, as_arrays=False)}
    sizes = _read_sizes({_strip_name(name): shape for name, shape in shapes.items()})
    written = {}
    used = set()
    for name, shape in shapes.items():
        if _BESIDE.match(_strip_name(name)):
            continue
        target = _find_target(name, shape, origin.family.name, sizes, gating)
        part_shape = shape[1:] if target.is_stacked else shape
        wanted = _get_matrix_shape(part_shape, target.kind)
        parts = []
        for tensor in target.tensors:
            tensor = base + tensor.removeprefix("model.")
            found = tensors[tensor].shape if tensor in tensors else "not in the model"
            if found != wanted:
                raise CheckpointError(f"{name} asks for {tensor} {wanted}, which is {found}")
            parts.append(_from_matrix(tensors[tensor].read(), target.kind, part_shape))
            used.add(tensor)
        written[name] = np.stack(parts) if target.is_stacked else parts[0]
    if missing := sorted(tensors.keys() - used):
        raise CheckpointError(f"the tree has no place for {', '.join(missing[:4])}: {len(missing)} in all")
    return fill_like(like, written)


class _Target(NamedTuple):
    """The tensors in transformers that one array of the tree holds."""

    tensors: tuple[str, ...]
    kind: str = "same"
    """How the array, or each part of it, differs from its tensor."""
    is_stacked: bool = False
    """True if its first dim is the parts."""


def _find_target(name: str, shape: Shape, family: str, sizes: Mapping[str, int], gating: str | None) -> _Target:
    """Return what an array of the tree holds. **Raises** `CheckpointError` for a name that has no place, or a shape of
    other dims than the name says."""
    target = _read_name(name, shape, family, sizes, gating)
    expected = {"heads": 3, "heads out": 3, "transposed": 2}.get(target.kind)
    parts = len(target.tensors)
    if (target.is_stacked and shape[:1] != (parts,)) or expected not in (None, len(shape) - target.is_stacked):
        raise CheckpointError(f"{name} is {list(shape)}: expected {_DIMS[target.kind, parts]}")
    return target


_DIMS = {
    ("heads", 1): "heads embed head_dim",
    ("heads", 2): "2 kv_heads embed head_dim",
    ("heads", 3): "3 heads embed head_dim",
    ("heads out", 1): "heads head_dim embed",
    ("transposed", 1): "mlp embed",
}
"""Dims of the arrays that are rearranged, by kind and number of parts."""


def _read_name(name: str, shape: Shape, family: str, sizes: Mapping[str, int], gating: str | None) -> _Target:
    short = _strip_name(name)
    if short == "embedder/input_embedding":
        return _Target(("model.embed_tokens.weight",))
    if short == "final_norm/scale":
        return _Target(("model.norm.weight",))
    layer, _, part = short.partition("/")
    number = layer.removeprefix("layer_")
    attention = f"model.layers.{number}.self_attn"
    mlp = f"model.layers.{number}.mlp"
    projections = {"attn/q_einsum/w": "q", "attn/kv_einsum/w": "kv", "attn/qkv_einsum/w": "qkv"}
    norms = {f"{theirs}/scale": ours for theirs, ours in _NORMS[family].items()}
    if not number.isdecimal():
        part = ""
    if part in projections:
        letters = projections[part]
        tensors = tuple(f"{attention}.{letter}_proj.weight" for letter in letters)
        return _Target(tensors, "heads", is_stacked=len(letters) > 1)
    if part == "attn/attn_vec_einsum/w":
        return _Target((f"{attention}.o_proj.weight",), "heads out")
    if part in ("attn/_query_norm/scale", "attn/_key_norm/scale") and family == "gemma3_text":
        return _Target((f"{attention}.{part[6]}_norm.weight",))
    if part == "mlp/gating_einsum":
        is_by_rows = _find_gating(name, shape, sizes, gating) == "mlp embed"
        kind = "same" if is_by_rows else "transposed"
        return _Target((f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), kind, is_stacked=True)
    if part == "mlp/linear":
        return _Target((f"{mlp}.down_proj.weight",), "transposed")
    if part in norms:
        return _Target((f"model.layers.{number}.{norms[part]}.weight",))
    raise CheckpointError(f"{name} {list(shape)} has no place in {family}")


def _find_gating(name: str, shape: Shape, sizes: Mapping[str, int], gating: str | None) -> str:
    """Return the dims of a matrix of `gating_einsum`, by its shape. **Raises** `CheckpointError` if it fits neither
    order, `ValueError` if it fits both and `gating` does not say which."""
    if gating is not None and gating not in _GATINGS:
        raise ValueError(f"gating is {gating!r}: expected {' or '.join(map(repr, _GATINGS))}")
    mlp = sizes["intermediate_size"]
    embed = sizes["hidden_size"]
    shapes = {"mlp embed": (2, mlp, embed), "embed mlp": (2, embed, mlp)}
    fits = [dims for dims in _GATINGS if shapes[dims] == tuple(shape) and gating in (None, dims)]
    if not fits:
        wanted = " or ".join(str(list(shapes[dims])) for dims in _GATINGS if gating in (None, dims))
        raise CheckpointError(f"{name} is {list(shape)}: expected {wanted}")
    if len(fits) > 1:
        raise ValueError(f"{name} is {list(shape)}, which fits both orders: pass gating='mlp embed' or 'embed mlp'")
    return fits[0]


def _strip_name(name: str) -> str:
    """Return a name without what files add to it."""
    name = re.sub(r"^(params/)?(transformer/)?", "", name)
    return re.sub(r"(/mlp/(gating_einsum|linear))/w$", r"\1", name)


def _read_sizes(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the sizes of a config that a tree's shapes show.

    **Raises** `CheckpointError` for a tree without Gemma's names, or with layers stacked in one array.
    """
    layers = [int(found[1]) for name in shapes if (found := re.match(r"layer_(\d+)/", name))]
    wanted = {"embedder/input_embedding": 2, "layer_0/attn/attn_vec_einsum/w": 3, "layer_0/mlp/linear": 2}
    missing = [f"{name} of {dims} dims" for name, dims in wanted.items() if len(shapes.get(name, ())) != dims]
    if missing:
        raise CheckpointError(
            f"the tree is not Gemma's, with a dict of arrays for each layer: it lacks {', '.join(missing)}, and begins "
            f"with {', '.join(list(shapes)[:4]) or 'nothing'}"
        )
    (vocab, embed), (heads, head_dim, _), (mlp, _) = (shapes[name] for name in wanted)
    keys = shapes.get("layer_0/attn/kv_einsum/w", ())
    kv_heads = keys[1] if len(keys) == 4 else heads
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_hidden_layers": max(layers) + 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _check_family(name: str) -> None:
    if name not in _NORMS:
        raise CheckpointError(f"Gemma's JAX trees are read and written as {', '.join(_NORMS)}, not as {name}")


def _check_config(config: Mapping[str, Any], family: str, head_dim: int, defaults: Mapping[str, Any]) -> None:
    """**Raises** `CheckpointError` if the config lacks what its releases differ in and no tree shows."""
    missing = []
    if family == "gemma3_text" and "sliding_window" not in config:
        missing.append("sliding_window")
    if family == "gemma3_text" and not {"rope_parameters", "rope_scaling"} & config.keys():
        missing.append("rope_scaling, which may be None,")
    scalar = "query_pre_attn_scalar"
    if scalar in defaults and scalar not in config and head_dim != defaults[scalar]:
        missing.append(scalar)
    if missing:
        raise CheckpointError(
            f"the config lacks {' and '.join(missing)}: the tree does not show it, and releases of {family} differ in "
            "it; pass the release's config.json"
        )


def _get_matrix_shape(shape: Shape, kind: str) -> Shape:
    """Return the shape of the tensor that an array, or a part of one, holds."""
    if kind == "heads":
        heads, embed, head_dim = shape
        return heads * head_dim, embed
    if kind == "heads out":
        heads, head_dim, embed = shape
        return embed, heads * head_dim
    if kind == "transposed":
        return shape[::-1]
    return shape


def _to_matrix(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "heads":
        return x.swapaxes(1, 2).reshape(-1, x.shape[1])
    if kind == "heads out":
        return x.reshape(-1, x.shape[-1]).T
    if kind == "transposed":
        return x.T
    return x


def _from_matrix(matrix: np.ndarray, kind: str, shape: Shape) -> np.ndarray:
    if kind == "heads":
        heads, embed, head_dim = shape
        return np.ascontiguousarray(matrix.reshape(heads, head_dim, embed).swapaxes(1, 2))
    if kind in ("heads out", "transposed"):
        return np.ascontiguousarray(matrix.T).reshape(shape)
    return matrix
