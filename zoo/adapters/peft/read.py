"""Read PEFT's files: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers import AbstractEmbedding
from zoo.models.hf.spec import NameMap, TensorMapping
from zoo.models.parameter_paths import IndexRanges
from zoo.models.targets import LinearSite
from zoo.parallel.rounds import in_one_round
from zoo.weights import CheckpointError
from zoo.weights.directory import resolve_directory
from zoo.weights.safetensors import LazyTensor, open_safetensors

from ..apply import apply_adapters
from ..merged_layers import require_unmerged
from ..methods.dora import DoRA
from ..methods.embedding import EmbeddingLoRA
from ..methods.ia3 import IA3
from ..methods.lora import LoRA
from ..methods.low_rank import check_dropout_rate
from ..methods.modules_to_save import make_trainable
from ..names import (
    PREFIX,
    WEIGHTS_FILE,
    PeftModule,
    get_name_table,
    list_peft_modules,
    nest_parameters,
    read_floats,
)
from . import base_tensors
from .build_config import plan_lycoris, plan_vera, read_lycoris, read_vera
from .config import CONFIG_FILE, rank_from_config, read_config, scale_from_config
from .methods import format_shapes, plan_adalora, plan_oft, promote_dtypes, read_adalora, read_oft
from .targeting import is_feedforward, is_targeted, is_targeted_parameter
from .tying import find_tied_modules, resolve_tying

_Model = TypeVar("Model")
_LayerArrays = Mapping[tuple[int, ...], dict[str, Any]]
"""Index into the stacked dims -> the arrays of that layer."""


@in_one_round
def load(model: _Model, directory: str | Path, *, dropout: float | int = 0.0, adapter_name: str = "default") -> _Model:
    """Load a PEFT adapter onto its base model, which has the tensor names of a checkpoint, as `zoo.load` returns it.

    - `dropout`: dropout rate of a LoRA or DoRA that is trained further. The file's own rate is not read.
    - `adapter_name`: the name that the adapter's parameter paths contain.

    The file has to be complete: the tensors of every module that the config targets, every bias and every module that
    it trains in full, in floating point, and no others.

    **Raises** `CheckpointError` for a path that is no adapter directory, a method or option that is not supported or of
    another type, tensors of modules that the model does not have or the config does not target, and tensors that are
    missing, no floating-point numbers, or of another shape; `ValueError` for a model whose adapters are merged.
    """
    require_unmerged(model)
    path = resolve_directory(directory)
    config, source = read_config(path), open_safetensors(path / WEIGHTS_FILE)
    table = get_name_table(model, in_memory=bool(config.get("target_parameters")))
    config, source = resolve_tying(config, source, find_tied_modules(model), str(path))
    reader = _AdapterReader(config, source, str(path / WEIGHTS_FILE), adapter_name, check_dropout_rate(dropout))
    reader.read_modules(model, table)
    remaining = {name.removeprefix(PREFIX): tensor for name, tensor in source.items() if name not in reader.names_read}
    trained, names_read = base_tensors.read_base_tensors(
        model, table, remaining, config, reader.targeted_names, reader.path
    )
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
        self.targeted_names: set[str] = set()
        """PEFT's names of the modules that the config targets."""
        self._other_names: set[str] = set()
        """PEFT's names of the other modules."""
        self.layers: dict[tuple[str, IndexRanges], dict[tuple[int, ...], dict[str, Any]]] = {}
        """Identity of a `LinearSite` -> index into its stacked dims -> the arrays of that layer."""
        self._read_method = _READERS[config["peft_type"]]

    def read_modules(self, model: Any, table: NameMap) -> None:
        """Read the arrays of every module that the config targets. **Raises** `CheckpointError` if the config targets
        no module of the model, and for targeted modules without tensors."""
        modules = list(list_peft_modules(model, table))
        targeted = nest_parameters([found for module in modules if (found := self._find_target(module)) is not None])
        self.targeted_names = {module.peft_name for module in targeted}
        self._other_names = {module.peft_name for module in modules} - self.targeted_names
        if not targeted:
            wanted = [self.config[key] for key in ("target_modules", "target_parameters") if self.config.get(key)]
            raise CheckpointError(f"{self.path}: {CONFIG_FILE} targets {wanted[0]}, which no module of the model is")
        missing: dict[str, None] = {}
        for module in targeted:
            arrays = self._read_method(self, module)
            if arrays is None:
                missing[module.peft_name] = None
            else:
                self.layers.setdefault(module.site.identity, {})[module.index] = arrays
        if missing:
            raise CheckpointError(
                f"{self.path} is incomplete: it has no tensors for {len(missing)} of the {len(self.targeted_names)} "
                f"modules that {CONFIG_FILE} targets, {next(iter(missing))} the first"
            )

    def _find_target(self, module: PeftModule) -> PeftModule | None:
        """Return a module that the config targets, by itself or by its parameter; None for another."""
        is_embedding = isinstance(module.site.module, AbstractEmbedding)
        in_all_linear = not is_embedding and module.site.name != "head"
        if not module.parameter and is_targeted(self.config, module.peft_name, in_all_linear=in_all_linear):
            return module
        parameter = module.parameter or f"{module.peft_name}.weight"
        if not is_targeted_parameter(self.config, parameter):
            return None
        if is_embedding or (module.mapping.transposed and not module.parameter):
            raise CheckpointError(f"{self.path}: {parameter} is a target parameter, which is read for matrices only")
        return module._replace(parameter=parameter)

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
        """Read a tensor of a module, of one expert, or with `has_rows` the rows of one part of a fused module; None if
        missing."""
        name = f"{PREFIX}{module.peft_name}.{suffix}"
        if name not in self.source:
            return None
        array = self.source[name].read() if name in self.names_read else read_floats(self.source[name], name, self.path)
        self.names_read.add(name)
        if module.holds_experts:
            array = self._select_expert(module, name, np.asarray(array), has_rows=has_rows)
        if not has_rows or len(module.mapping.parts) == 1:
            return array
        if array.ndim == 0 or len(array) != sum(module.part_sizes):
            raise CheckpointError(
                f"{self.path}: {name} has the shape {list(array.shape)}, and its parts {sum(module.part_sizes)} rows"
            )
        mapping = TensorMapping(module.mapping.parts, module.mapping.groups)
        shapes = [(size, *array.shape[1:]) for size in module.part_sizes]
        return mapping.views(array, shapes, 0)[module.part].reshape(shapes[module.part])

    def _select_expert(self, module: PeftModule, name: str, array: np.ndarray, *, has_rows: bool) -> np.ndarray:
        """Return one expert's A of shape [rank, in], or with `has_rows` its B of shape [out, rank]."""
        experts, expert = module.num_experts, module.index[-1]
        if array.ndim != 2 or array.shape[1 if has_rows else 0] % experts:
            raise CheckpointError(
                f"{self.path}: {name} has the shape {list(array.shape)}, which is not that of {experts} experts"
            )
        if has_rows:
            return array.reshape(len(array), -1, experts)[:, :, expert]
        return array.reshape(experts, -1, array.shape[1])[expert]

    def check_all_read(self) -> None:
        """**Raises** `CheckpointError` for tensors that fit no module of the model, or none that the config targets."""
        unread = sorted(set(self.source) - self.names_read)
        if not unread:
            return
        parents = [unread[0].removeprefix(PREFIX).rsplit(".", count)[0] for count in (1, 2)]
        if self._other_names & set(parents):
            raise CheckpointError(
                f"{self.path} has {len(unread)} tensors of modules that {CONFIG_FILE} does not target, {unread[0]} the "
                "first"
            )
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
    rank = rank_from_config(reader.config, module.pattern_name)
    shapes, expected = [None if x is None else x.shape for x in (down, up)], [(rank, inputs), (outputs, rank)]
    if down is None or up is None or shapes != expected:
        raise CheckpointError(
            f"{reader.path}: lora_A and lora_B of {module.peft_name} are {format_shapes(shapes)}, where "
            f"{format_shapes(expected)} were expected: it multiplies {inputs} numbers and gives {outputs}, and r and "
            f"rank_pattern give it the rank {rank}"
        )
    arrays = {"down": down, "up": up, "scale": scale_from_config(reader.config, module.pattern_name, rank)}
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
    dtype = promote_dtypes(layers)
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
    inputs = is_feedforward(reader.config, module.peft_name)
    shape, sizes = reader.source[name].shape, (sum(module.part_sizes), module.site.get_shape()[1])
    if shape != ((1, sizes[1]) if inputs else (sizes[0], 1)):
        raise CheckpointError(
            f"{reader.path}: {name} has the shape {list(shape)}, where {sizes[inputs]} numbers were expected, one per "
            f"{'input, a row' if inputs else 'output, a column'}: feedforward_modules says which"
        )
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
    factors = np.ones((*stacked_shape, len(first)), promote_dtypes(layers))
    applies = np.zeros(stacked_shape, bool)
    for index, arrays in layers.items():
        factors[index], applies[index] = arrays["factors"], True

    def factory(base: Any, *, key: Any, factors: Any, applies: Any) -> IA3:
        adapter = IA3(base, inputs=inputs, applies=applies, adapter_name=reader.adapter_name)
        return eqx.tree_at(lambda ia3: ia3.of_in if inputs else ia3.of_out, adapter, factors)

    return factory, {"factors": factors, "applies": applies}


_READERS = {"LORA": _read_lora, "IA3": _read_ia3, "VERA": read_vera, "LOHA": read_lycoris, "LOKR": read_lycoris}
_READERS |= {"OFT": read_oft, "ADALORA": read_adalora}
_PLANNERS = {"LORA": _plan_lora, "IA3": _plan_ia3, "VERA": plan_vera, "LOHA": plan_lycoris, "LOKR": plan_lycoris}
_PLANNERS |= {"OFT": plan_oft, "ADALORA": plan_adalora}
