"""Read PEFT's files: adapter_config.json and adapter_model.safetensors."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers.embedding import AbstractEmbedding
from zoo.models.hf.spec import NameMap
from zoo.models.parameter_paths import IndexRanges
from zoo.models.restack import keep_layers
from zoo.models.targets import LinearSite
from zoo.weights.directory import resolve_directory
from zoo.weights.safetensors import CheckpointError, LazyTensor, open_safetensors

from ..apply import apply_adapters
from ..base import AbstractAdapter
from ..merged_layers import require_unmerged
from ..methods.lora import LoRA
from ..methods.low_rank import check_dropout_rate
from ..methods.modules_to_save import make_trainable
from ..methods.token_rows import wrap_embedding
from ..names import PeftModule, get_callers, get_name_table, list_peft_modules, nest_parameters
from . import base_tensors
from .config import CONFIG_FILE, SUBTRACTED_INITIAL_VALUES, read_config, shorten_repr
from .methods import METHODS, PeftMethod, PeftTensor, refuse_fused, select_method
from .prompts import read_prompt, take_token_rows
from .sharing import join_calls
from .source import PREFIX, WEIGHTS_FILE, AdapterSource
from .targeting import is_targeted, is_targeted_parameter
from .tying import find_tied_modules, resolve_tying

_Model = TypeVar("Model")
_LayerArrays = Mapping[tuple[int, ...], Mapping[str, Any]]
"""Index into the stacked dims -> the arrays and scalars of that layer, by field of the adapter."""


def load(
    model: _Model,
    directory: str | Path,
    *,
    revision: str | None = None,
    dropout: float | int = 0.0,
    adapter_name: str = "default",
) -> _Model:
    """Load a PEFT adapter onto its base model, which has the tensor names of a checkpoint, as `zoo.load` returns it.

    - `directory`, `revision`: a path, or a name on the Hugging Face hub, as for `zoo.load`.
    - `dropout`: dropout rate of a LoRA or DoRA that is trained further. The file's own rate is not read.
    - `adapter_name`: the name that the adapter's parameter paths contain.

    With `layer_replication` the result has the repeated layers, as copies, and is merged and saved as such a model.

    The file has to be complete: the tensors of every module that the config targets, every bias and every module that
    it trains in full, in floating point, and no others.

    **Raises** `CheckpointError` for a path that is not an adapter directory, a method or option that is not supported
    or of another type, tensors of modules that the model does not have or the config does not target, and tensors that
    are missing, not floating-point, or of another shape; `ValueError` for a model whose adapters are merged.
    """
    require_unmerged(model)
    path = resolve_directory(directory, revision, config=CONFIG_FILE)
    config = read_config(path)
    tensors = open_safetensors(path / WEIGHTS_FILE)
    if "num_virtual_tokens" in config:
        return read_prompt(model, config, tensors, str(path / WEIGHTS_FILE), adapter_name)
    if config.get("layer_replication"):
        model = _replicate_layers(model, config["layer_replication"], str(path / CONFIG_FILE))
    rows, tensors = take_token_rows(model, config, tensors, str(path / WEIGHTS_FILE))
    if rows is not None:
        ids, array = rows
        model = wrap_embedding(model, lambda _: array, ids, adapter_name)
        if config["peft_type"] == "TRAINABLE_TOKENS":
            return model
    table = _choose_name_table(model, config, tensors)
    tensors = join_calls(tensors, get_callers(model), str(path / WEIGHTS_FILE))
    config, tensors = resolve_tying(config, tensors, find_tied_modules(model), str(path))
    source = AdapterSource(config, tensors, str(path / WEIGHTS_FILE), adapter_name, check_dropout_rate(dropout))
    reader = _AdapterReader(source)
    reader.read_modules(model, table)
    remaining = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name not in source.names_read}
    trained, names_read = base_tensors.read_base_tensors(
        model, table, remaining, config, reader.targeted_names, source.path
    )
    source.names_read |= {PREFIX + name for name in names_read}
    reader.check_all_read()
    adapted = apply_adapters(model, reader.plan_adapter, jax.random.key(0))
    return make_trainable(adapted, trained, adapter_name)


def _replicate_layers(model: Any, stretches: Sequence[Sequence[int]], path: str) -> Any:
    """Return the model with stretches of its layers, one after the other: copies, since each has adapters of its own.

    **Raises** `CheckpointError` for a model of no family, and as `zoo.models.keep_layers` raises.
    """
    order = [number for begin, end in stretches for number in range(begin, end)]
    origin = getattr(model, "origin", None)
    if origin is None or "num_hidden_layers" not in (config := json.loads(origin.config)):
        raise CheckpointError(f"{path}: layer_replication is read for a model whose config has num_hidden_layers")
    try:
        repeated = keep_layers(model, order)
    except (ValueError, NotImplementedError, TypeError) as error:
        raise CheckpointError(f"{path}: layer_replication = {stretches}, and {error}") from None
    lists = {key: [config[key][n] for n in order] for key in config if key.endswith("layer_types") and config[key]}
    config = {**config, **lists, "num_hidden_layers": len(order), "_name_or_path": ""}
    return dataclasses.replace(repeated, origin=dataclasses.replace(origin, config=json.dumps(config)))


def _choose_name_table(model: Any, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> NameMap:
    """Return the names that a file uses: of the modules that transformers 5 builds, or of the base's tensors, which
    are the modules of transformers 4."""
    in_files, in_memory = (get_name_table(model, in_memory=in_memory) for in_memory in (False, True))
    if config.get("target_parameters"):
        return in_memory

    def count_known(table: NameMap) -> int:
        modules = {PREFIX + module.peft_name for module in list_peft_modules(model, table)}
        return sum(any(name.rsplit(".", count)[0] in modules for count in (1, 2)) for name in tensors)

    return max(in_files, in_memory, key=count_known)


class _AdapterReader:
    """Reads the tensors of one adapter module by module, and collects them per linear layer of the model."""

    def __init__(self, source: AdapterSource):
        self.source = source
        self.targeted_names: set[str] = set()
        """PEFT's names of the modules that the config targets."""
        self._other_names: set[str] = set()
        """PEFT's names of the other modules."""
        self._layers: dict[tuple[str, IndexRanges], dict[tuple[int, ...], dict[str, Any]]] = {}
        """Identity of a `LinearSite` -> index into its stacked dims -> the arrays of that layer."""

    def read_modules(self, model: Any, table: NameMap) -> None:
        """Read the arrays of every module that the config targets. **Raises** `CheckpointError` if the config targets
        no module of the model, and for targeted modules without tensors."""
        source = self.source
        modules = list(list_peft_modules(model, table))
        targeted = nest_parameters([found for module in modules if (found := self._find_target(module)) is not None])
        self.targeted_names = {module.peft_name for module in targeted}
        self._other_names = {module.peft_name for module in modules} - self.targeted_names
        if not targeted:
            wanted = [source.config[key] for key in ("target_modules", "target_parameters") if source.config.get(key)]
            raise CheckpointError(f"{source.path}: {CONFIG_FILE} targets {wanted[0]}, which no module of the model is")
        missing: dict[str, None] = {}
        for module in targeted:
            arrays = read_module(source, module)
            if arrays is None:
                missing[module.peft_name] = None
            else:
                self._layers.setdefault(module.site.identity, {})[module.index] = arrays
        if missing:
            raise CheckpointError(
                f"{source.path} is incomplete: it has no tensors for {len(missing)} of the {len(self.targeted_names)} "
                f"modules that {CONFIG_FILE} targets, {next(iter(missing))} the first"
            )

    def _find_target(self, module: PeftModule) -> PeftModule | None:
        """Return a module that the config targets, by itself or by its parameter; None for another."""
        config = self.source.config
        is_embedding = isinstance(module.site.module, AbstractEmbedding)
        in_all_linear = not is_embedding and module.site.name not in ("head", "score")
        if not module.parameter and is_targeted(config, module.peft_name, in_all_linear=in_all_linear):
            return module
        parameter = module.parameter or f"{module.peft_name}.weight"
        if not is_targeted_parameter(config, parameter):
            return None
        if is_embedding or (module.mapping.transposed and not module.parameter):
            raise CheckpointError(
                f"{self.source.path}: {parameter} is a target parameter, which is read for matrices only"
            )
        return module._replace(parameter=parameter)

    def check_all_read(self) -> None:
        """**Raises** `CheckpointError` for tensors that fit no module of the model, or none that the config targets."""
        path = self.source.path
        unread = sorted(set(self.source.tensors) - self.source.names_read)
        if not unread:
            return
        parents = [unread[0].removeprefix(PREFIX).rsplit(".", count)[0] for count in (1, 2)]
        if self._other_names & set(parents):
            raise CheckpointError(
                f"{path} has {len(unread)} tensors of modules that {CONFIG_FILE} does not target, {unread[0]} the first"
            )
        raise CheckpointError(
            f"{path} has {len(unread)} tensors for which the model has no module, {unread[0]} the first"
        )

    def plan_adapter(self, site: LinearSite) -> Any:
        """Plan the adapter of a linear layer for `apply_adapters`, or return None if the file has none for it."""
        if site.identity not in self._layers:
            return None
        return plan_adapter(self.source, site, self._layers[site.identity])


def read_module(source: AdapterSource, module: PeftModule) -> dict[str, Any] | None:
    """Read the arrays of a module's adapter, by field, and its scalars. Return None if the file has no tensors of it.

    **Raises** `CheckpointError` for a tensor that is missing, that should not be there, or of another shape.
    """
    method = select_method(source.config, module.site.module)
    _refuse_table(source, module)
    refuse_fused(method, module, source.path)
    _refuse_subtracted(source, module)
    source.names_read |= method.shared.keys() & source.tensors.keys()
    shapes = method.find_shapes(source, module)
    arrays: dict[str, np.ndarray] = {}
    wrong: list[tuple[PeftTensor, np.ndarray | None]] = []
    for tensor in method.list_tensors(shapes):
        array = source.read_tensor(module, tensor.suffix, has_rows=tensor.has_rows)
        if array is not None:
            arrays[tensor.field] = array
        if _get_shape(array) != shapes.get(tensor.field):
            wrong.append((tensor, array))
    if not arrays:
        return None
    if wrong:
        raise CheckpointError(_describe_wrong_shapes(source, module, method, shapes, wrong))
    for tensor in method.tensors:
        if tensor.field in arrays:
            arrays[tensor.field] = tensor.from_peft(arrays[tensor.field])
    return {**arrays, **method.find_scalars(source, module)}


def _refuse_table(source: AdapterSource, module: PeftModule) -> None:
    """**Raises** `CheckpointError` for an embedding with another method than LoRA."""
    if not isinstance(module.site.module, AbstractEmbedding):
        return
    config = source.config
    if config["peft_type"] == "LORA" and not config["use_dora"]:
        return
    if config["peft_type"] == "LORA":
        given = "use_dora is set"
    else:
        given = f"peft_type is {config['peft_type']}"
    raise CheckpointError(f"{source.path}: {given}, and {module.peft_name} is a table: it is read with LoRA only")


def _refuse_subtracted(source: AdapterSource, module: PeftModule) -> None:
    """**Raises** `CheckpointError` for PiSSA or OLoRA of another method, or of anything but one matrix."""
    initial = source.config.get("init_lora_weights")
    mapping = module.mapping
    is_one = len(mapping.parts) == mapping.runs == 1 and not (mapping.transposed or module.holds_experts)
    is_lora = select_method(source.config, module.site.module) is METHODS[LoRA]
    if initial in SUBTRACTED_INITIAL_VALUES and not (is_one and is_lora):
        raise CheckpointError(
            f"{source.path}: init_lora_weights = {initial!r} is read for a LoRA of a Linear, and {module.peft_name} is "
            "not one here: save with path_initial_model_for_weight_conversion"
        )


def _get_shape(array: np.ndarray | None) -> tuple[int, ...] | None:
    return None if array is None else array.shape


def _describe_wrong_shapes(
    source: AdapterSource,
    module: PeftModule,
    method: PeftMethod,
    shapes: Mapping[str, tuple[int, ...]],
    wrong: Sequence[tuple[PeftTensor, np.ndarray | None]],
) -> str:
    """Return an error that names the tensors, their shapes, and the options that the expected shapes follow from."""
    names = " and ".join(tensor.suffix.removesuffix(".weight") for tensor, _ in wrong)
    found = _format_shapes([_get_shape(array) for _, array in wrong])
    expected = _format_shapes([shapes.get(tensor.field) for tensor, _ in wrong])
    options = ", ".join(f"{key} = {shorten_repr(source.config[key])}" for key in method.shape_options)
    verbs = ("is", "was") if len(wrong) == 1 else ("are", "were")
    return (
        f"{source.path}: {names} of {module.peft_name} {verbs[0]} {found}, where {expected} {verbs[1]} expected: the "
        f"model's matrix is {list(module.site.get_shape())}, and {CONFIG_FILE} has {options}"
    )


def _format_shapes(shapes: Sequence[tuple[int, ...] | None]) -> str:
    """Return shapes as text, "nothing" for a tensor that is missing."""
    return ", ".join("nothing" if shape is None else str(list(shape)) for shape in shapes)


def plan_adapter(
    source: AdapterSource, site: LinearSite, layers: _LayerArrays
) -> tuple[Callable[..., AbstractAdapter], dict[str, np.ndarray]]:
    """Plan the adapter of a linear layer: its factory, and the fields of all stacked layers, padded to the largest
    rank. **Raises** `CheckpointError` for layers with different fields, and for dropout where none is applied."""
    method = select_method(source.config, site.module)
    if source.dropout and method.peft_type == "LORA" and not site.supports_dropout:
        raise CheckpointError(
            f"{source.path}: what {site.name} reads is not dropped: read the adapter without dropout="
        )
    _require_equal_fields(source, site, method, layers)
    fills = {tensor.field: tensor.fill or 0 for tensor in method.tensors}
    dtype = method.dtype or _promote_dtypes(layers)
    tables = {}
    for field, value in next(iter(layers.values())).items():
        is_array = isinstance(value, np.ndarray)
        values = {index: fields[field] for index, fields in layers.items()}
        tables[field] = _stack_layers(site, values, fills.get(field, 0), dtype if is_array else value.dtype)

    def factory(base: Any, *, key: Any, **fields: Any) -> AbstractAdapter:
        made = method.make(source, base, key)
        initial = source.config.get("init_lora_weights")
        if initial in SUBTRACTED_INITIAL_VALUES:
            sizes = {"max_rank": len(fields["down.weight"]), "rank": fields["rank"], "scale": fields["scale"]}
            options = {"dropout": source.dropout, "adapter_name": source.adapter_name}
            made = LoRA(base, **sizes, **options, init=initial, key=key)
        return _replace_fields(method, made, fields)

    return factory, tables


def _require_equal_fields(source: AdapterSource, site: LinearSite, method: PeftMethod, layers: _LayerArrays) -> None:
    """**Raises** `CheckpointError` if stacked layers have different forms of an adapter."""
    forms = {tuple(field for field in fields if fields[field].ndim) for fields in layers.values()}
    if len(forms) > 1:
        described = " and for others ".join(", ".join(form) for form in sorted(forms))
        raise CheckpointError(
            f"{source.path}: {site.name} is one array over its layers, and for some the file has {described}: "
            f"{', '.join(method.shape_options)} should give all of them one form of {method.peft_type}"
        )


def _promote_dtypes(layers: _LayerArrays) -> Any:
    """Return the dtype that holds the numbers of all layers without rounding them."""
    dtypes = {x.dtype for fields in layers.values() for x in fields.values() if isinstance(x, np.ndarray)}
    return reduce(jnp.promote_types, dtypes)


def _stack_layers(site: LinearSite, layers: Mapping[tuple[int, ...], Any], fill: float | int, dtype: Any) -> np.ndarray:
    """Stack one field of all layers, with `fill` in layers without the adapter. Smaller arrays are padded with it."""
    stacked_shape = [len(run) for run in site.ranges]
    largest = [max(1, *sizes) for sizes in zip(*(np.shape(x) for x in layers.values()), strict=True)]
    table = np.full((*stacked_shape, *largest), fill, dtype)
    for index, x in layers.items():
        table[(*index, *(slice(size) for size in np.shape(x)))] = x
    return table


def _replace_fields(method: PeftMethod, made: AbstractAdapter, fields: Mapping[str, Any]) -> AbstractAdapter:
    """Replace the fields of an adapter that was just made. Tensors of the method that `fields` lacks become None."""
    values = {**dict.fromkeys(tensor.field for tensor in method.tensors), **fields}
    where = lambda adapter: [attrgetter(field)(adapter) for field in values]
    adapter = eqx.tree_at(where, made, list(values.values()), is_leaf=lambda x: x is None)
    for tensor in method.tensors:
        if tensor.fill is None:
            value = jnp.where(adapter.has_adapter, tensor.get(adapter), tensor.get(made))
            adapter = eqx.tree_at(tensor.get, adapter, value)
    return adapter
