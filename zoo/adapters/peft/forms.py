"""OFT and AdaLoRA in PEFT's files: what is read for a module, how it becomes an adapter, and the config of either."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import numpy as np

from zoo.weights import CheckpointError

from ..methods.adalora import RANK_EPSILON, AdaLoRA
from ..methods.oft import OFT
from ..targets import LinearSite
from .names import PeftModule

_LayerArrays = Mapping[tuple[int, ...], dict[str, Any]]


@runtime_checkable
class _AdapterSource(Protocol):
    """The tensors of one adapter, and what its config says."""

    config: Mapping[str, Any]
    path: str
    adapter_name: str

    def read_tensor(self, module: PeftModule, suffix: str, *, has_rows: bool = False) -> np.ndarray | None: ...


def read_oft(source: _AdapterSource, module: PeftModule) -> dict[str, Any] | None:
    pairs = source.read_tensor(module, "oft_R.weight")
    if pairs is None:
        return None
    _, inputs = module.site.sizes()
    size = round((1 + (1 + 8 * pairs.shape[-1]) ** 0.5) / 2)
    shared = bool(source.config["block_share"])
    blocks = inputs // size if size > 1 else 0
    if blocks * size != inputs or pairs.shape != (1 if shared else blocks, size * (size - 1) // 2):
        raise CheckpointError(
            f"{source.path}: {module.peft_name} multiplies {inputs} numbers, and its oft_R is {list(pairs.shape)}, which "
            "are no blocks of them"
        )
    return {"size": size, "pairs": pairs[0] if shared else pairs}


def plan_oft(source: _AdapterSource, site: LinearSite, parts: _LayerArrays) -> Any:
    runs, one, sizes = [len(run) for run in site.numbers], next(iter(parts.values())), set()
    pairs, applies = np.zeros((*runs, *one["pairs"].shape), one["pairs"].dtype), np.zeros(runs, bool)
    for index, part in parts.items():
        sizes.add(part["size"])
        if len(sizes) > 1:
            raise CheckpointError(f"{source.path}: {site.name} is one array over its layers, whose blocks differ")
        pairs[index], applies[index] = part["pairs"], True
    shared, exact = bool(source.config["block_share"]), not source.config["use_cayley_neumann"]
    terms = None if exact else source.config["num_cayley_neumann_terms"]

    def make(base: Any, *, key: Any, pairs: Any, applies: Any) -> OFT:
        made = OFT(
            base,
            block_size=one["size"],
            shared=shared,
            neumann_terms=terms,
            applies=applies,
            adapter_name=source.adapter_name,
        )
        return eqx.tree_at(lambda oft: oft.shared if shared else oft.blocks, made, pairs)

    return make, {"pairs": pairs, "applies": applies}


def build_oft_config(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any]:
    """Of OFT, of whose blocks the files know one size, or one count, for all modules: where inputs are no whole blocks
    of it, the nearest that they are. **Raises** `CheckpointError` where no such number gives the blocks that there
    are."""
    every = [(module.site.sizes()[1], adapter) for module, adapter, _ in adapters.values()]
    wanted = {
        "oft_block_size": {(inputs, adapter.block_size) for inputs, adapter in every},
        "r": {(inputs, inputs // adapter.block_size) for inputs, adapter in every},
    }
    tried = [(word, sorted({own for _, own in pairs})) for word, pairs in wanted.items()]
    tried += [(word, range(1, max(inputs for inputs, _ in every) + 1)) for word in wanted]
    fits = lambda word, asked: all(_find_nearest_divisor(inputs, asked) == own for inputs, own in wanted[word])
    found = next(({word: asked} for word, numbers in tried for asked in numbers if fits(word, asked)), None)
    kinds = {(adapter.shared is not None, adapter.neumann_terms) for _, adapter in every}
    if found is None or len(kinds) > 1:
        raise CheckpointError("PEFT's files have one size of blocks, or one count, and one form of OFT for all modules")
    shared, terms = kinds.pop()
    # PEFT asks which version wrote a file: the first whose series is ours.
    return {
        "peft_type": "OFT", "peft_version": "0.18.0", "r": 0, "oft_block_size": 0, **found, "bias": "none",
        "block_share": shared, "use_cayley_neumann": terms is not None, "num_cayley_neumann_terms": terms or 5,
        "coft": False, "module_dropout": 0.0, "init_weights": True,
    }  # fmt: skip


def _find_nearest_divisor(inputs: int, requested: int) -> int:
    """What PEFT makes of a size of blocks, or of their number: the divisor nearest to it, of two the smaller."""
    if requested >= inputs:
        return inputs
    return min((n for n in range(1, inputs + 1) if inputs % n == 0), key=lambda n: (abs(n - requested), n))


def read_adalora(source: _AdapterSource, module: PeftModule) -> dict[str, Any] | None:
    down, values = source.read_tensor(module, "lora_A"), source.read_tensor(module, "lora_E")
    up = source.read_tensor(module, "lora_B", has_rows=True)
    if down is None and up is None and values is None:
        return None
    outputs, inputs = module.site.sizes()
    shapes = [None if x is None else x.shape for x in (down, up, values)]
    if down is None or up is None or values is None or shapes != [(n := len(down), inputs), (outputs, n), (n, 1)]:
        told = ", ".join("nothing" if shape is None else str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{source.path}: {module.peft_name} multiplies {inputs} numbers and gives {outputs}, and lora_A, lora_B and "
            f"lora_E are {told}"
        )
    alpha = source.config["lora_alpha"]
    scale = (alpha if alpha > 0 else len(down)) / (source.config["init_r"] + RANK_EPSILON)
    return {"down": down, "up": up, "values": values[:, 0], "scale": scale}


def plan_adalora(source: _AdapterSource, site: LinearSite, parts: _LayerArrays) -> Any:
    """Factors of the largest rank for all layers, those of fewer ranks filled up with zeros."""
    runs, (outputs, inputs) = [len(run) for run in site.numbers], site.sizes()
    largest = max(1, *(len(part["down"]) for part in parts.values()))
    dtype = next(iter(parts.values()))["down"].dtype
    tables = {
        "rank": np.zeros(runs, np.int32),
        "applies": np.zeros(runs, bool),
        "scale": np.zeros(runs, np.float32),
        "down": np.zeros((*runs, largest, inputs), dtype),
        "up": np.zeros((*runs, outputs, largest), dtype),
        "values": np.zeros((*runs, largest), dtype),
    }
    for index, part in parts.items():
        rank = len(part["down"])
        tables["rank"][index], tables["applies"][index], tables["scale"][index] = rank, True, part["scale"]
        tables["down"][index][:rank], tables["up"][index][:, :rank] = part["down"], part["up"]
        tables["values"][index][:rank] = part["values"]

    def make(base: Any, *, key: Any, scale: Any, applies: Any, **arrays: Any) -> AdaLoRA:
        made = AdaLoRA(base, rank=largest, scale=scale, applies=applies, adapter_name=source.adapter_name, key=key)
        where = lambda a: (a.rank, a.down.weight, a.up.weight, a.values)
        return eqx.tree_at(where, made, tuple(arrays[word] for word in ("rank", "down", "up", "values")))

    return make, tables


def build_adalora_config(adapters: Mapping[str, tuple[PeftModule, Any, Any]]) -> dict[str, Any]:
    """Of AdaLoRA: a module's rank is how many of the first are left. **Raises** `CheckpointError` where modules are
    scaled differently, for which the files have no place."""
    ranks = {theirs: int(np.asarray(one.rank)[module.index]) for theirs, (module, one, _) in adapters.items()}
    scales = {float(np.asarray(one.scale)[module.index]) for module, one, _ in adapters.values()}
    if len(scales) > 1:
        raise CheckpointError(f"PEFT's files have one alpha for all AdaLoRA's modules, and they have {sorted(scales)}")
    first = max(1, *ranks.values())
    alpha = float(f"{scales.pop() * (first + RANK_EPSILON):.6g}")
    left = {
        f"{theirs}.lora_E": [True] * rank + [False] * (first - rank) for theirs, rank in ranks.items() if rank < first
    }
    return {
        "peft_type": "ADALORA", "init_r": first, "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "rank_pattern": left or None, "total_step": 1, "bias": "none", "lora_dropout": 0.0, "init_lora_weights": True,
    }  # fmt: skip
