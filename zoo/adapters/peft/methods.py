"""Read and write OFT and AdaLoRA in PEFT's format: tensors of a module, the adapter they build, and the config."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from zoo.models.targets import LinearSite
from zoo.weights import CheckpointError
from zoo.weights.safetensors import LazyTensor

from ..methods.adalora import RANK_EPSILON, AdaLoRA
from ..methods.oft import OFT
from ..names import PeftModule

_LayerArrays = Mapping[tuple[int, ...], dict[str, Any]]
"""Index into the stacked dims -> the arrays of that layer."""


@runtime_checkable
class AdapterSource(Protocol):
    """The tensors and config of one adapter file."""

    config: Mapping[str, Any]
    source: Mapping[str, LazyTensor]
    path: str
    adapter_name: str
    names_read: set[str]

    def read_tensor(self, module: PeftModule, suffix: str, *, has_rows: bool = False) -> np.ndarray | None: ...

    def read_vector(
        self, module: PeftModule, suffix: str, size: int, *, has_rows: bool = False
    ) -> np.ndarray | None: ...


def promote_dtypes(layers: _LayerArrays) -> Any:
    """Return the dtype that holds the numbers of all layers without rounding them."""
    arrays = [x for layer in layers.values() for x in layer.values() if isinstance(x, np.ndarray)]
    return reduce(jnp.promote_types, {x.dtype for x in arrays})


def format_shapes(shapes: Sequence[tuple[int, ...] | None]) -> str:
    """Return shapes as text, "nothing" for a tensor that is missing."""
    return ", ".join("nothing" if shape is None else str(list(shape)) for shape in shapes)


def read_oft(source: AdapterSource, module: PeftModule) -> dict[str, Any] | None:
    """Read the block size and parameters of a module's OFT, or None if it has none."""
    pairs = source.read_tensor(module, "oft_R.weight")
    if pairs is None:
        return None
    _, inputs = module.site.get_shape()
    shared, block_size, r = source.config["block_share"], source.config["oft_block_size"], source.config["r"]
    size = _find_nearest_divisor(inputs, block_size) if block_size else inputs // _find_nearest_divisor(inputs, r)
    expected = (1 if shared else inputs // size, size * (size - 1) // 2)
    if pairs.shape != expected:
        raise CheckpointError(
            f"{source.path}: {module.peft_name} multiplies {inputs} numbers, and its oft_R is {list(pairs.shape)}, "
            f"where {list(expected)} was expected: blocks of {size}"
        )
    return {"size": size, "pairs": pairs[0] if shared else pairs}


def plan_oft(source: AdapterSource, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the OFT of a linear layer: its factory, and the arrays of all stacked layers."""
    stacked_shape, first = [len(run) for run in site.ranges], next(iter(layers.values()))
    pairs = np.zeros((*stacked_shape, *first["pairs"].shape), promote_dtypes(layers))
    applies = np.zeros(stacked_shape, bool)
    for index, arrays in layers.items():
        pairs[index], applies[index] = arrays["pairs"], True
    shared, exact = source.config["block_share"], not source.config["use_cayley_neumann"]
    terms = None if exact else source.config["num_cayley_neumann_terms"]

    def factory(base: Any, *, key: Any, pairs: Any, applies: Any) -> OFT:
        adapter = OFT(
            base,
            block_size=first["size"],
            shared=shared,
            neumann_terms=terms,
            applies=applies,
            adapter_name=source.adapter_name,
        )
        return eqx.tree_at(lambda oft: oft.shared if shared else oft.blocks, adapter, pairs)

    return factory, {"pairs": pairs, "applies": applies}


def build_oft_config(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any]:
    """Build the config of an OFT. It has one block size, or one block count, for all modules, and PEFT takes the
    nearest divisor of each module's inputs. **Raises** `CheckpointError` if no number gives the blocks of all
    modules."""
    sizes = [(module.site.get_shape()[1], adapter) for module, adapter, _ in adapters.values()]
    expected = {
        "oft_block_size": {(inputs, adapter.block_size) for inputs, adapter in sizes},
        "r": {(inputs, inputs // adapter.block_size) for inputs, adapter in sizes},
    }
    candidates = [(key, sorted({number for _, number in pairs})) for key, pairs in expected.items()]
    candidates += [(key, range(1, max(inputs for inputs, _ in sizes) + 1)) for key in expected]
    fits = lambda key, value: all(_find_nearest_divisor(inputs, value) == number for inputs, number in expected[key])
    chosen = next(({key: value} for key, values in candidates for value in values if fits(key, value)), None)
    options = {(adapter.shared is not None, adapter.neumann_terms) for _, adapter in sizes}
    if chosen is None or len(options) > 1:
        raise CheckpointError("PEFT's files have one size of blocks, or one count, and one form of OFT for all modules")
    shared, terms = options.pop()
    # PEFT checks the version that wrote a file: 0.18 is the first with this Neumann series.
    return {
        "peft_type": "OFT", "peft_version": "0.18.0", "r": 0, "oft_block_size": 0, **chosen, "bias": "none",
        "block_share": shared, "use_cayley_neumann": terms is not None, "num_cayley_neumann_terms": terms or 5,
        "coft": False, "module_dropout": 0.0, "init_weights": True,
    }  # fmt: skip


def _find_nearest_divisor(inputs: int, requested: int) -> int:
    """Return the divisor of `inputs` that is nearest to a block size or count, the smaller of two, as PEFT does."""
    if requested >= inputs:
        return inputs
    return min((n for n in range(1, inputs + 1) if inputs % n == 0), key=lambda n: (abs(n - requested), n))


def read_adalora(source: AdapterSource, module: PeftModule) -> dict[str, Any] | None:
    """Read A, B, e and the scale of a module's AdaLoRA, or None if it has none."""
    down, values = source.read_tensor(module, "lora_A"), source.read_tensor(module, "lora_E")
    up = source.read_tensor(module, "lora_B", has_rows=True)
    if down is None and up is None and values is None:
        return None
    outputs, inputs = module.site.get_shape()
    shapes = [None if x is None else x.shape for x in (down, up, values)]
    kept = (source.config["rank_pattern"] or {}).get(f"{module.peft_name}.lora_E")
    rank = source.config["init_r"] if kept is None else sum(kept)
    expected = [(rank, inputs), (outputs, rank), (rank, 1)]
    if down is None or up is None or values is None or shapes != expected:
        raise CheckpointError(
            f"{source.path}: lora_A, lora_B and lora_E of {module.peft_name} are {format_shapes(shapes)}, where "
            f"{format_shapes(expected)} were expected: init_r and rank_pattern give it the rank {rank}"
        )
    alpha = source.config["lora_alpha"]
    scale = (alpha if alpha > 0 else len(down)) / (source.config["init_r"] + RANK_EPSILON)
    return {"down": down, "up": up, "values": values[:, 0], "scale": scale}


def plan_adalora(source: AdapterSource, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the AdaLoRA of a linear layer: factors of all stacked layers, padded with zeros to the largest rank."""
    stacked_shape, (outputs, inputs) = [len(run) for run in site.ranges], site.get_shape()
    max_rank = max(1, *(len(arrays["down"]) for arrays in layers.values()))
    dtype = promote_dtypes(layers)
    tables = {
        "rank": np.zeros(stacked_shape, np.int32),
        "applies": np.zeros(stacked_shape, bool),
        "scale": np.zeros(stacked_shape, np.float32),
        "down": np.zeros((*stacked_shape, max_rank, inputs), dtype),
        "up": np.zeros((*stacked_shape, outputs, max_rank), dtype),
        "values": np.zeros((*stacked_shape, max_rank), dtype),
    }
    for index, arrays in layers.items():
        rank = len(arrays["down"])
        tables["rank"][index], tables["applies"][index], tables["scale"][index] = rank, True, arrays["scale"]
        tables["down"][index][:rank], tables["up"][index][:, :rank] = arrays["down"], arrays["up"]
        tables["values"][index][:rank] = arrays["values"]

    def factory(base: Any, *, key: Any, scale: Any, applies: Any, **arrays: Any) -> AdaLoRA:
        adapter = AdaLoRA(base, rank=max_rank, scale=scale, applies=applies, adapter_name=source.adapter_name, key=key)
        where = lambda adapter: (adapter.rank, adapter.down.weight, adapter.up.weight, adapter.values)
        return eqx.tree_at(where, adapter, tuple(arrays[name] for name in ("rank", "down", "up", "values")))

    return factory, tables


def build_adalora_config(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any]:
    """Build the config of an AdaLoRA, where a module keeps its first `rank` ranks. **Raises** `CheckpointError` if
    scales differ between modules, which the format cannot store."""
    ranks = {name: int(np.asarray(adapter.rank)[module.index]) for name, (module, adapter, _) in adapters.items()}
    scales = {float(np.asarray(adapter.scale)[module.index]) for module, adapter, _ in adapters.values()}
    if len(scales) > 1:
        raise CheckpointError(f"PEFT's files have one alpha for all AdaLoRA's modules, and they have {sorted(scales)}")
    max_rank = max(1, *ranks.values())
    alpha = float(f"{scales.pop() * (max_rank + RANK_EPSILON):.6g}")
    rank_pattern = {
        f"{name}.lora_E": [True] * rank + [False] * (max_rank - rank) for name, rank in ranks.items() if rank < max_rank
    }
    return {
        "peft_type": "ADALORA", "init_r": max_rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "rank_pattern": rank_pattern or None, "total_step": 1, "bias": "none", "lora_dropout": 0.0,
        "init_lora_weights": True,
    }  # fmt: skip
