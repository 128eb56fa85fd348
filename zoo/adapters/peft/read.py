"""PEFT's files in: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers import AbstractEmbedding
from zoo.models.hf.spec import TensorMapping
from zoo.models.parameter_paths import IndexRanges
from zoo.weights import CheckpointError
from zoo.weights.resolve import resolve_directory
from zoo.weights.safetensors import LazyTensor, open_safetensors

from ..apply import apply_adapters
from ..base import AbstractAdapter
from ..methods.dora import DoRA
from ..methods.embedding import EmbeddingLoRA
from ..methods.ia3 import IA3
from ..methods.lora import LoRA
from ..methods.low_rank import check_dropout_rate
from ..methods.lycoris import LoHa, LoKr
from ..methods.modules_to_save import make_trainable
from ..methods.vera import VeRA
from ..targets import LinearSite
from . import base_tensors
from .config import read_config, scale_from_config
from .forms import plan_adalora, plan_oft, read_adalora, read_oft
from .names import LYCORIS_FIELDS, PREFIX, VERA_SHARED, WEIGHTS_FILE, PeftModule, get_name_table, list_peft_modules

_Model = TypeVar("Model")


def load(model: _Model, directory: str | Path, *, dropout: float | int = 0.0, adapter_name: str = "default") -> _Model:
    """The model with the adapter of a PEFT directory around its matrices. `model` is, or has the names of, a checkpoint
    that we read: `zoo.load` gives one.

    - `dropout`: of a LoRA or DoRA, where it is learnt on: a file's own is a matter of how it was learnt, and not read.
    - `label`: what the adapter is called, and its parameters stand under.

    **Raises** `CheckpointError` for a directory that is none, a method or an option that we do not compute, tensors of
    modules that the model does not have, and tensors that are missing or of another shape.
    """
    path = resolve_directory(directory)
    config, source = read_config(path), open_safetensors(path / WEIGHTS_FILE)
    table = get_name_table(model)
    reader = _AdapterReader(config, source, str(path / WEIGHTS_FILE), adapter_name, check_dropout_rate(dropout))
    for module in list_peft_modules(model, table):
        reader.read_module(module)
    tied = getattr(model, "head", True) is None and not config["ensure_weight_tying"]
    if tied and any(name == "embedding" for name, _ in reader.parts):
        raise CheckpointError(
            f"{path}: the embedding has an adapter, and is the head here too; PEFT leaves the head as it was unless "
            "ensure_weight_tying is set, which is another model: untie the two in the base"
        )
    of_base = {name.removeprefix(PREFIX): tensor for name, tensor in source.items() if name not in reader.read_so_far}
    values, also = base_tensors.read_base_tensors(model, table, of_base, config, reader.path)
    reader.read_so_far |= {PREFIX + name for name in also}
    reader.check_all_read()
    return make_trainable(apply_adapters(model, reader.plan_adapter, jax.random.key(0)), values, adapter_name)


class _AdapterReader:
    """The tensors of one adapter, as they are found for the modules of a model."""

    def __init__(
        self, config: Mapping[str, Any], source: Mapping[str, LazyTensor], path: str, adapter_name: str, dropout: float
    ):
        self.config, self.source, self.path, self.adapter_name, self.dropout = (
            config,
            source,
            path,
            adapter_name,
            dropout,
        )
        self.read_so_far: set[str] = set()
        self.parts: dict[tuple[str, IndexRanges], dict[tuple[int, ...], dict[str, Any]]] = {}
        """Place of ours -> index -> its arrays."""
        self.method = _READERS[config["peft_type"]]

    def read_vector(self, module: PeftModule, suffix: str, size: int, *, has_rows: bool = False) -> np.ndarray | None:
        """One that has a number for each of `size`. **Raises** `CheckpointError` where it has not."""
        found = self.read_tensor(module, suffix, has_rows=has_rows)
        if found is not None and found.size != size:
            raise CheckpointError(
                f"{self.path}: {module.peft_name}.{suffix} has the shape {list(found.shape)}, where {size} numbers were "
                "expected"
            )
        return None if found is None else found.reshape(-1)

    def read_tensor(self, module: PeftModule, suffix: str, *, has_rows: bool = False) -> np.ndarray | None:
        """One of a module's tensors, or the part of it that is ours."""
        name = f"{PREFIX}{module.peft_name}.{suffix}"
        if name not in self.source:
            return None
        self.read_so_far.add(name)
        numbers = np.asarray(self.source[name].read())
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{self.path}: {name} has a number that is not finite")
        if not has_rows or len(module.mapping.parts) == 1:
            return numbers
        if len(numbers) != sum(module.part_sizes):
            raise CheckpointError(
                f"{self.path}: {name} has {len(numbers)} rows, and its parts {sum(module.part_sizes)}"
            )
        row = TensorMapping(module.mapping.parts, module.mapping.groups)
        parts = [(size, *numbers.shape[1:]) for size in module.part_sizes]
        return row.views(numbers, parts, 0)[module.part].reshape(parts[module.part])

    def read_module(self, module: PeftModule) -> None:
        found = self.method(self, module)
        if found is not None:
            self.parts.setdefault(module.site.identity, {})[module.index] = found

    def check_all_read(self) -> None:
        """**Raises** `CheckpointError` for tensors that no module of the model has read."""
        if unread := sorted(set(self.source) - self.read_so_far - set(VERA_SHARED)):
            raise CheckpointError(
                f"{self.path} has {len(unread)} tensors for which the model has no module, {unread[0]} the first"
            )

    def plan_adapter(self, site: LinearSite) -> Any:
        """For one of the model's matrices, a maker of its adapter."""
        if site.identity not in self.parts:
            return None
        return _PLANNERS[self.config["peft_type"]](self, site, self.parts[site.identity])


def _read_lora(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    is_table = isinstance(module.site.module, AbstractEmbedding)
    words = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
    down, up = reader.read_tensor(module, words[0]), reader.read_tensor(module, words[1], has_rows=True)
    if down is None and up is None:
        return None
    outputs, inputs = module.site.sizes()[:: -1 if is_table else 1]
    if down is None or up is None or down.shape[1:] != (inputs,) or up.shape != (outputs, len(down)):
        told = " and ".join(str(list(x.shape)) if x is not None else "nothing" for x in (down, up))
        raise CheckpointError(
            f"{reader.path}: {module.peft_name} multiplies {inputs} numbers and gives {outputs}, and lora_A and lora_B "
            f"are {told}"
        )
    found = {"down": down, "up": up, "scale": scale_from_config(reader.config, module.peft_name, len(down))}
    if reader.config["use_dora"] and is_table:
        raise CheckpointError(
            f"{reader.path}: use_dora is set, and {module.peft_name} is a table: it is read with LoRA only"
        )
    if reader.config["use_dora"]:
        found["magnitude"] = reader.read_vector(module, "lora_magnitude_vector", outputs, has_rows=True)
        if found["magnitude"] is None:
            raise CheckpointError(
                f"{reader.path}: use_dora is set, and {module.peft_name} has no lora_magnitude_vector"
            )
    return found


def _plan_lora(reader: _AdapterReader, site: LinearSite, parts: Mapping[tuple[int, ...], dict[str, Any]]) -> Any:
    """Factors of the largest rank for all layers, those of fewer ranks filled up with zeros."""
    if reader.dropout and not site.supports_dropout:
        raise CheckpointError(
            f"{reader.path}: what {site.name} reads is not dropped: read the adapter without dropout="
        )
    runs, (outputs, inputs) = [len(run) for run in site.numbers], site.sizes()
    if isinstance(site.module, AbstractEmbedding):
        outputs, inputs = inputs, outputs
    largest = max(len(part["down"]) for part in parts.values())
    dtype = next(iter(parts.values()))["down"].dtype
    tables = {
        "rank": np.zeros(runs, np.int32),
        "scale": np.zeros(runs, np.float32),
        "down": np.zeros((*runs, largest, inputs), dtype),
        "up": np.zeros((*runs, outputs, largest), dtype),
    }
    for index, part in parts.items():
        rank = len(part["down"])
        tables["rank"][index], tables["scale"][index] = rank, part["scale"]
        tables["down"][index][:rank], tables["up"][index][:, :rank] = part["down"], part["up"]
    if reader.config["use_dora"]:
        tables["magnitude"] = np.zeros((*runs, outputs), dtype)
        for index, part in parts.items():
            tables["magnitude"][index] = part["magnitude"]

    def make(base: Any, *, rank: Any, scale: Any, key: Any, down: Any, up: Any, magnitude: Any = None) -> Any:
        options = {"max_rank": largest, "rank": rank, "scale": scale, "adapter_name": reader.adapter_name, "key": key}
        if isinstance(base, AbstractEmbedding):
            table = EmbeddingLoRA(base, **options)
            return eqx.tree_at(lambda a: (a.down, a.up.weight), table, (down.T, up))
        adapter = (LoRA if magnitude is None else DoRA)(base, dropout=reader.dropout, **options)
        adapter = eqx.tree_at(lambda a: (a.down.weight, a.up.weight), adapter, (down, up))
        if magnitude is None:
            return adapter
        own = jnp.where(rank > 0, magnitude, adapter.magnitude)  # of a layer that has no adapter: as it was
        return eqx.tree_at(lambda a: a.magnitude, adapter, own)

    return make, tables


def _read_ia3(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    name = f"{PREFIX}{module.peft_name}.ia3_l"
    if name not in reader.source:
        return None
    inputs = reader.source[name].shape[0] == 1
    gate = reader.read_vector(module, "ia3_l", module.site.sizes()[1 if inputs else 0], has_rows=not inputs)
    return {"inputs": inputs, "gate": gate}


def _plan_ia3(reader: _AdapterReader, site: LinearSite, parts: Mapping[tuple[int, ...], dict[str, Any]]) -> Any:
    runs = [len(run) for run in site.numbers]
    kinds = {part["inputs"] for part in parts.values()}
    if len(kinds) > 1:
        raise CheckpointError(f"{reader.path}: {site.name} multiplies inputs in some layers and outputs in others")
    inputs = kinds.pop()
    one = next(iter(parts.values()))["gate"]
    gates, applies = np.ones((*runs, len(one)), one.dtype), np.zeros(runs, bool)
    for index, part in parts.items():
        gates[index], applies[index] = part["gate"], True

    def make(base: Any, *, key: Any, gate: Any, applies: Any) -> IA3:
        adapter = IA3(base, inputs=inputs, applies=applies, adapter_name=reader.adapter_name)
        return eqx.tree_at(lambda a: a.of_in if inputs else a.of_out, adapter, gate)

    return make, {"gate": gates, "applies": applies}


def _read_vera(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    shared = reader.source.get(next(iter(VERA_SHARED)))
    down = reader.read_vector(module, "vera_lambda_d", reader.config["r"] if shared is None else shared.shape[0])
    up = reader.read_vector(module, "vera_lambda_b", module.site.sizes()[0], has_rows=True)
    if down is None and up is None:
        return None
    if down is None or up is None:
        raise CheckpointError(f"{reader.path}: {module.peft_name} has one of vera_lambda_d and vera_lambda_b, not both")
    return {"down_scale": down, "up_scale": up}


def _plan_vera(reader: _AdapterReader, site: LinearSite, parts: Mapping[tuple[int, ...], dict[str, Any]]) -> Any:
    if missing := [name for name in VERA_SHARED if name not in reader.source]:
        raise CheckpointError(
            f"{reader.path} has no {missing[0]}: PEFT drew it from PyTorch's generator, and saves it with "
            "save_projection=True"
        )
    down, up = (jnp.asarray(reader.source[name].read()) for name in VERA_SHARED)
    runs, rank = [len(run) for run in site.numbers], len(down)
    outputs, _ = site.sizes()
    tables = {
        "down_scale": np.zeros((*runs, rank), np.float32),
        "up_scale": np.zeros((*runs, outputs), np.float32),
        "applies": np.zeros(runs, bool),
    }
    for index, part in parts.items():
        for word, numbers in part.items():
            tables[word][index] = numbers
        tables["applies"][index] = True

    def make(base: Any, *, key: Any, applies: Any, **vectors: Any) -> VeRA:
        adapter = VeRA(base, shared=(down, up), applies=applies, adapter_name=reader.adapter_name)
        return eqx.tree_at(lambda a: (a.down_scale, a.up_scale), adapter, (vectors["down_scale"], vectors["up_scale"]))

    return make, tables


def _read_lycoris(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    method = reader.config["peft_type"]
    by_rows = method == "LOHA"
    arrays = {
        ours: reader.read_tensor(module, theirs, has_rows=by_rows and theirs.endswith("_a"))
        for theirs, ours in LYCORIS_FIELDS[method].items()
    }
    arrays = {word: numbers for word, numbers in arrays.items() if numbers is not None}
    if not arrays:
        return None
    if len(module.mapping.parts) > 1 and not by_rows:
        raise CheckpointError(
            f"{reader.path}: {module.peft_name} holds {', '.join(module.mapping.parts)}, which are matrices of their own "
            "here, and a Kronecker product is not cut into theirs"
        )
    return {"scale": scale_from_config(reader.config, module.peft_name, reader.config["r"]), **arrays}


def _plan_lycoris(reader: _AdapterReader, site: LinearSite, parts: Mapping[tuple[int, ...], dict[str, Any]]) -> Any:
    runs, one = [len(run) for run in site.numbers], next(iter(parts.values()))
    tables = {word: np.zeros((*runs, *np.shape(numbers)), np.float32) for word, numbers in one.items()}
    tables["applies"] = np.zeros(runs, bool)
    for index, part in parts.items():
        if {word: np.shape(x) for word, x in part.items()} != {word: np.shape(x) for word, x in one.items()}:
            raise CheckpointError(f"{reader.path}: {site.name} is one array over its layers, which differ in shape")
        tables["applies"][index] = True
        for word, numbers in part.items():
            tables[word][index] = numbers
    kind = {"LOHA": LoHa, "LOKR": LoKr}[reader.config["peft_type"]]
    words = list(LYCORIS_FIELDS[reader.config["peft_type"]].values())

    def make(base: Any, *, key: Any, scale: Any, applies: Any, **arrays: Any) -> AbstractAdapter:
        adapter = kind(base, rank=1, scale=scale, applies=applies, adapter_name=reader.adapter_name, key=key)
        where = lambda adapter: [getattr(adapter, word) for word in words]
        return eqx.tree_at(where, adapter, [arrays.get(word) for word in words], is_leaf=lambda x: x is None)

    return make, tables


_READERS = {"LORA": _read_lora, "IA3": _read_ia3, "VERA": _read_vera, "LOHA": _read_lycoris, "LOKR": _read_lycoris}
_READERS |= {"OFT": read_oft, "ADALORA": read_adalora}
_PLANNERS = {"LORA": _plan_lora, "IA3": _plan_ia3, "VERA": _plan_vera, "LOHA": _plan_lycoris, "LOKR": _plan_lycoris}
_PLANNERS |= {"OFT": plan_oft, "ADALORA": plan_adalora}
