"""Read PEFT's files: adapter_config.json and adapter_model.safetensors."""

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
_LayerArrays = Mapping[tuple[int, ...], dict[str, Any]]
"""Index into the stacked dims -> the arrays of that layer."""


def load(model: _Model, directory: str | Path, *, dropout: float | int = 0.0, adapter_name: str = "default") -> _Model:
    """Load a PEFT adapter onto its base model, which has the tensor names of a checkpoint, as `zoo.load` returns it.

    - `dropout`: dropout rate of a LoRA or DoRA that is trained further. The file's own rate is not read.
    - `adapter_name`: the name that the adapter's parameter paths contain.

    **Raises** `CheckpointError` for a path that is no adapter directory, a method or option that is not supported,
    tensors of modules that the model does not have, and tensors that are missing or of another shape.
    """
    path = resolve_directory(directory)
    config, source = read_config(path), open_safetensors(path / WEIGHTS_FILE)
    table = get_name_table(model)
    reader = _AdapterReader(config, source, str(path / WEIGHTS_FILE), adapter_name, check_dropout_rate(dropout))
    for module in list_peft_modules(model, table):
        reader.read_module(module)
    is_tied = getattr(model, "head", True) is None and not config["ensure_weight_tying"]
    if is_tied and any(name == "embedding" for name, _ in reader.layers):
        raise CheckpointError(
            f"{path}: the embedding has an adapter, and is the head here too; PEFT leaves the head as it was unless "
            "ensure_weight_tying is set, which is another model: untie the two in the base"
        )
    remaining = {name.removeprefix(PREFIX): tensor for name, tensor in source.items() if name not in reader.names_read}
    trained, names_read = base_tensors.read_base_tensors(model, table, remaining, config, reader.path)
    reader.names_read |= {PREFIX + name for name in names_read}
    reader.check_all_read()
    return make_trainable(apply_adapters(model, reader.plan_adapter, jax.random.key(0)), trained, adapter_name)


class _AdapterReader:
    """Reads the tensors of one adapter module by module, and collects them per linear layer of the model."""

    def __init__(
        self, config: Mapping[str, Any], source: Mapping[str, LazyTensor], path: str, adapter_name: str, dropout: float
    ):
        self.config, self.source, self.path = config, source, path
        self.adapter_name, self.dropout = adapter_name, dropout
        self.names_read: set[str] = set()
        self.layers: dict[tuple[str, IndexRanges], dict[tuple[int, ...], dict[str, Any]]] = {}
        """Identity of a `LinearSite` -> index into its stacked dims -> the arrays of that layer."""
        self.read_method = _READERS[config["peft_type"]]

    def read_vector(self, module: PeftModule, suffix: str, size: int, *, has_rows: bool = False) -> np.ndarray | None:
        """Read a tensor as a vector. **Raises** `CheckpointError` unless it has `size` elements."""
        tensor = self.read_tensor(module, suffix, has_rows=has_rows)
        if tensor is not None and tensor.size != size:
            raise CheckpointError(
                f"{self.path}: {module.peft_name}.{suffix} has the shape {list(tensor.shape)}, where {size} numbers "
                "were expected"
            )
        return None if tensor is None else tensor.reshape(-1)

    def read_tensor(self, module: PeftModule, suffix: str, *, has_rows: bool = False) -> np.ndarray | None:
        """Read a tensor of a module, or with `has_rows` the rows of one part of a fused module; None if missing."""
        name = f"{PREFIX}{module.peft_name}.{suffix}"
        if name not in self.source:
            return None
        self.names_read.add(name)
        array = np.asarray(self.source[name].read())
        if not np.isfinite(array).all():
            raise CheckpointError(f"{self.path}: {name} has a number that is not finite")
        if not has_rows or len(module.mapping.parts) == 1:
            return array
        if len(array) != sum(module.part_sizes):
            raise CheckpointError(f"{self.path}: {name} has {len(array)} rows, and its parts {sum(module.part_sizes)}")
        mapping = TensorMapping(module.mapping.parts, module.mapping.groups)
        shapes = [(size, *array.shape[1:]) for size in module.part_sizes]
        return mapping.views(array, shapes, 0)[module.part].reshape(shapes[module.part])

    def read_module(self, module: PeftModule) -> None:
        """Read and collect the arrays of a module, if the file has them."""
        arrays = self.read_method(self, module)
        if arrays is not None:
            self.layers.setdefault(module.site.identity, {})[module.index] = arrays

    def check_all_read(self) -> None:
        """**Raises** `CheckpointError` for tensors that fit no module of the model."""
        if unread := sorted(set(self.source) - self.names_read - set(VERA_SHARED)):
            raise CheckpointError(
                f"{self.path} has {len(unread)} tensors for which the model has no module, {unread[0]} the first"
            )

    def plan_adapter(self, site: LinearSite) -> Any:
        """Plan the adapter of a linear layer for `apply_adapters`, or return None if the file has none for it."""
        if site.identity not in self.layers:
            return None
        return _PLANNERS[self.config["peft_type"]](self, site, self.layers[site.identity])


def _read_lora(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    is_embedding = isinstance(module.site.module, AbstractEmbedding)
    suffixes = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
    down, up = reader.read_tensor(module, suffixes[0]), reader.read_tensor(module, suffixes[1], has_rows=True)
    if down is None and up is None:
        return None
    outputs, inputs = module.site.get_shape()[:: -1 if is_embedding else 1]
    if down is None or up is None or down.shape[1:] != (inputs,) or up.shape != (outputs, len(down)):
        shapes = " and ".join(str(list(x.shape)) if x is not None else "nothing" for x in (down, up))
        raise CheckpointError(
            f"{reader.path}: {module.peft_name} multiplies {inputs} numbers and gives {outputs}, and lora_A and lora_B "
            f"are {shapes}"
        )
    arrays = {"down": down, "up": up, "scale": scale_from_config(reader.config, module.peft_name, len(down))}
    if reader.config["use_dora"] and is_embedding:
        raise CheckpointError(
            f"{reader.path}: use_dora is set, and {module.peft_name} is a table: it is read with LoRA only"
        )
    if reader.config["use_dora"]:
        arrays["magnitude"] = reader.read_vector(module, "lora_magnitude_vector", outputs, has_rows=True)
        if arrays["magnitude"] is None:
            raise CheckpointError(
                f"{reader.path}: use_dora is set, and {module.peft_name} has no lora_magnitude_vector"
            )
    return arrays


def _plan_lora(reader: _AdapterReader, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the LoRA or DoRA of a linear layer: factors of all stacked layers, padded with zeros to the largest rank."""
    if reader.dropout and not site.supports_dropout:
        raise CheckpointError(
            f"{reader.path}: what {site.name} reads is not dropped: read the adapter without dropout="
        )
    stacked_shape, (outputs, inputs) = [len(run) for run in site.ranges], site.get_shape()
    if isinstance(site.module, AbstractEmbedding):
        outputs, inputs = inputs, outputs
    max_rank = max(len(arrays["down"]) for arrays in layers.values())
    dtype = next(iter(layers.values()))["down"].dtype
    tables = {
        "rank": np.zeros(stacked_shape, np.int32),
        "scale": np.zeros(stacked_shape, np.float32),
        "down": np.zeros((*stacked_shape, max_rank, inputs), dtype),
        "up": np.zeros((*stacked_shape, outputs, max_rank), dtype),
    }
    for index, arrays in layers.items():
        rank = len(arrays["down"])
        tables["rank"][index], tables["scale"][index] = rank, arrays["scale"]
        tables["down"][index][:rank], tables["up"][index][:, :rank] = arrays["down"], arrays["up"]
    if reader.config["use_dora"]:
        tables["magnitude"] = np.zeros((*stacked_shape, outputs), dtype)
        for index, arrays in layers.items():
            tables["magnitude"][index] = arrays["magnitude"]

    def factory(base: Any, *, rank: Any, scale: Any, key: Any, down: Any, up: Any, magnitude: Any = None) -> Any:
        options = {"max_rank": max_rank, "rank": rank, "scale": scale, "adapter_name": reader.adapter_name, "key": key}
        if isinstance(base, AbstractEmbedding):
            adapter = EmbeddingLoRA(base, **options)
            return eqx.tree_at(lambda lora: (lora.down, lora.up.weight), adapter, (down.T, up))
        adapter = (LoRA if magnitude is None else DoRA)(base, dropout=reader.dropout, **options)
        adapter = eqx.tree_at(lambda lora: (lora.down.weight, lora.up.weight), adapter, (down, up))
        if magnitude is None:
            return adapter
        magnitude = jnp.where(rank > 0, magnitude, adapter.magnitude)  # a layer without the adapter keeps |W|
        return eqx.tree_at(lambda dora: dora.magnitude, adapter, magnitude)

    return factory, tables


def _read_ia3(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    name = f"{PREFIX}{module.peft_name}.ia3_l"
    if name not in reader.source:
        return None
    inputs = reader.source[name].shape[0] == 1
    factors = reader.read_vector(module, "ia3_l", module.site.get_shape()[1 if inputs else 0], has_rows=not inputs)
    return {"inputs": inputs, "factors": factors}


def _plan_ia3(reader: _AdapterReader, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the IA3 of a linear layer: factors of all stacked layers."""
    stacked_shape = [len(run) for run in site.ranges]
    sides = {arrays["inputs"] for arrays in layers.values()}
    if len(sides) > 1:
        raise CheckpointError(f"{reader.path}: {site.name} multiplies inputs in some layers and outputs in others")
    inputs = sides.pop()
    first = next(iter(layers.values()))["factors"]
    factors, applies = np.ones((*stacked_shape, len(first)), first.dtype), np.zeros(stacked_shape, bool)
    for index, arrays in layers.items():
        factors[index], applies[index] = arrays["factors"], True

    def factory(base: Any, *, key: Any, factors: Any, applies: Any) -> IA3:
        adapter = IA3(base, inputs=inputs, applies=applies, adapter_name=reader.adapter_name)
        return eqx.tree_at(lambda ia3: ia3.of_in if inputs else ia3.of_out, adapter, factors)

    return factory, {"factors": factors, "applies": applies}


def _read_vera(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    shared = reader.source.get(next(iter(VERA_SHARED)))
    down = reader.read_vector(module, "vera_lambda_d", reader.config["r"] if shared is None else shared.shape[0])
    up = reader.read_vector(module, "vera_lambda_b", module.site.get_shape()[0], has_rows=True)
    if down is None and up is None:
        return None
    if down is None or up is None:
        raise CheckpointError(f"{reader.path}: {module.peft_name} has one of vera_lambda_d and vera_lambda_b, not both")
    return {"down_scale": down, "up_scale": up}


def _plan_vera(reader: _AdapterReader, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the VeRA of a linear layer: scaling vectors of all stacked layers, and the shared A and B."""
    if missing := [name for name in VERA_SHARED if name not in reader.source]:
        raise CheckpointError(
            f"{reader.path} has no {missing[0]}: PEFT drew it from PyTorch's generator, and saves it with "
            "save_projection=True"
        )
    down, up = (jnp.asarray(reader.source[name].read()) for name in VERA_SHARED)
    stacked_shape, rank = [len(run) for run in site.ranges], len(down)
    outputs, _ = site.get_shape()
    tables = {
        "down_scale": np.zeros((*stacked_shape, rank), np.float32),
        "up_scale": np.zeros((*stacked_shape, outputs), np.float32),
        "applies": np.zeros(stacked_shape, bool),
    }
    for index, arrays in layers.items():
        for field, array in arrays.items():
            tables[field][index] = array
        tables["applies"][index] = True

    def factory(base: Any, *, key: Any, applies: Any, down_scale: Any, up_scale: Any) -> VeRA:
        adapter = VeRA(base, shared=(down, up), applies=applies, adapter_name=reader.adapter_name)
        return eqx.tree_at(lambda vera: (vera.down_scale, vera.up_scale), adapter, (down_scale, up_scale))

    return factory, tables


def _read_lycoris(reader: _AdapterReader, module: PeftModule) -> dict[str, Any] | None:
    method = reader.config["peft_type"]
    has_rows = method == "LOHA"
    arrays = {
        field: reader.read_tensor(module, suffix, has_rows=has_rows and suffix.endswith("_a"))
        for suffix, field in LYCORIS_FIELDS[method].items()
    }
    arrays = {field: array for field, array in arrays.items() if array is not None}
    if not arrays:
        return None
    if len(module.mapping.parts) > 1 and not has_rows:
        raise CheckpointError(
            f"{reader.path}: {module.peft_name} holds {', '.join(module.mapping.parts)}, which are separate matrices "
            "here, and a Kronecker product is not cut into theirs"
        )
    return {"scale": scale_from_config(reader.config, module.peft_name, reader.config["r"]), **arrays}


def _plan_lycoris(reader: _AdapterReader, site: LinearSite, layers: _LayerArrays) -> Any:
    """Plan the LoHa or LoKr of a linear layer: factors of all stacked layers."""
    stacked_shape, first = [len(run) for run in site.ranges], next(iter(layers.values()))
    tables = {field: np.zeros((*stacked_shape, *np.shape(array)), np.float32) for field, array in first.items()}
    tables["applies"] = np.zeros(stacked_shape, bool)
    shapes = {field: np.shape(array) for field, array in first.items()}
    for index, arrays in layers.items():
        if {field: np.shape(array) for field, array in arrays.items()} != shapes:
            raise CheckpointError(f"{reader.path}: {site.name} is one array over its layers, which differ in shape")
        tables["applies"][index] = True
        for field, array in arrays.items():
            tables[field][index] = array
    adapter_class = {"LOHA": LoHa, "LOKR": LoKr}[reader.config["peft_type"]]
    fields = list(LYCORIS_FIELDS[reader.config["peft_type"]].values())

    def factory(base: Any, *, key: Any, scale: Any, applies: Any, **arrays: Any) -> AbstractAdapter:
        adapter = adapter_class(base, rank=1, scale=scale, applies=applies, adapter_name=reader.adapter_name, key=key)
        where = lambda adapter: [getattr(adapter, field) for field in fields]
        return eqx.tree_at(where, adapter, [arrays.get(field) for field in fields], is_leaf=lambda x: x is None)

    return factory, tables


_READERS = {"LORA": _read_lora, "IA3": _read_ia3, "VERA": _read_vera, "LOHA": _read_lycoris, "LOKR": _read_lycoris}
_READERS |= {"OFT": read_oft, "ADALORA": read_adalora}
_PLANNERS = {"LORA": _plan_lora, "IA3": _plan_ia3, "VERA": _plan_vera, "LOHA": _plan_lycoris, "LOKR": _plan_lycoris}
_PLANNERS |= {"OFT": plan_oft, "ADALORA": plan_adalora}
