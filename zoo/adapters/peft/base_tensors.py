"""Read and write the base's tensors in PEFT's files: biases, modules_to_save, and embeddings under adapters."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zoo.models.hf.spec import NameMap
from zoo.models.parameter_paths import IndexRanges, list_parameter_paths, walk_parameters
from zoo.models.sequence_score import SequenceScore
from zoo.parallel.rounds import merge_rounds
from zoo.parallel.trainable_copy import TrainableCopy, is_trainable_copy
from zoo.weights.plan import TensorPlan, plan_tensors
from zoo.weights.safetensors import CheckpointError, LazyTensor
from zoo.weights.save import gather_to_host

from ..compose import strip_adapters
from .source import read_floats
from .targeting import is_saved, is_saved_by

_BASE_LAYER = ".base_layer."
_EMBEDDING_MODULES = ("embed_tokens", "lm_head")
"""Modules whose base weight PEFT saves with their adapter, since the vocabulary may have been extended."""
_CLASSIFIERS = ("classifier", "score")
"""Heads of classifiers. For the task SEQ_CLS, PEFT trains the one that the model has in full, and names both."""
_SCORE = "score"
"""The head of a `SequenceScore`, in all families."""
_ParameterKey = tuple[str, IndexRanges]
"""Name and index ranges of one of our arrays. The name is not unique: alternating kinds of layers share names."""
_TrainedValues = dict[_ParameterKey, tuple[np.ndarray, np.ndarray]]
"""For each parameter, the layers in which it is trainable, and its values in all of them."""


class _BaseTensors(NamedTuple):
    """The base model, and how its arrays map to tensors of its family's files."""

    base_model: Any
    """The model without adapters."""
    plan: Mapping[str, TensorPlan]
    """Tensor name -> its shape and the slices of our arrays in it."""
    parameter_keys: list[_ParameterKey]
    """Key of each array of the base model, in JAX's order."""


def _plan_base_tensors(model: Any, table: NameMap) -> _BaseTensors:
    base_model = merge_rounds(strip_adapters(model))
    return _BaseTensors(
        base_model, plan_tensors(base_model, table), [path[:2] for path in list_parameter_paths(base_model)]
    )


def read_base_tensors(
    model: Any,
    table: NameMap,
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    targeted: Collection[str],
    path: str,
) -> tuple[_TrainedValues, set[str]]:
    """Read the parameters that an adapter trains in full from `tensors`, by their names in the base. Return them and
    the tensor names that were read. `targeted` are the modules that have the adapter.

    **Raises** `CheckpointError` for a tensor that is missing, of another shape, or no floating-point numbers.
    """
    base = _plan_base_tensors(model, table)
    trained = {}
    names_read = set()
    leaves = jax.tree.leaves(base.base_model)
    _check_complete(base.plan, set(tensors), config, targeted, path)
    for name, tensor in tensors.items():
        base_name = name.replace(_BASE_LAYER, ".")
        if base_name not in base.plan or not _is_expected(base_name, name, config):
            continue
        names_read.add(name)
        planned = base.plan[base_name]
        array = read_floats(tensor, name, path)
        if array.shape != planned.shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {list(array.shape)}, and the model's {list(planned.shape)}"
            )
        before = [gather_to_host(leaves[part.leaf], part.index) for part in planned.slices]
        after = planned.mapping.views(np.array(array), planned.part_shapes, planned.num_stacked_dims)
        after = [view.reshape(x.shape) for view, x in zip(after, before, strict=True)]
        is_unchanged = all(np.array_equal(x, y) for x, y in zip(before, after, strict=True))
        if _is_embedding_weight(base_name, name) and is_unchanged:
            continue
        for part, values in zip(planned.slices, after, strict=True):
            x = leaves[part.leaf]
            key = base.parameter_keys[part.leaf]
            if key not in trained:
                stacked_shape = x.shape[: x.ndim - len(part.shape)]
                trained[key] = np.zeros(stacked_shape, bool), np.array(x, np.float32)
            applies, stacked_values = trained[key]
            applies[part.index], stacked_values[part.index] = True, values
    return trained, names_read


def _check_complete(
    plan: Mapping[str, TensorPlan], names: set[str], config: Mapping[str, Any], targeted: Collection[str], path: str
) -> None:
    """**Raises** `CheckpointError` for a bias, or a tensor of `modules_to_save`, that is missing."""
    modules = {name.rpartition(".")[0] for name in plan}
    has_classifier = any(is_saved_by(name, module) for name in _CLASSIFIERS for module in modules)
    for saved in config["modules_to_save"] or ():
        if config.get("task_type") == "SEQ_CLS" and saved in _CLASSIFIERS:
            if has_classifier:
                continue
            raise CheckpointError(
                f"{path}: the adapter is for a classifier, task_type = 'SEQ_CLS', and the model has no classes: load "
                "it onto zoo.models.SequenceScore.from_decoder(model, classes, key=key)"
            )
        if not any(is_saved_by(saved, module) for module in modules):
            raise CheckpointError(f"{path}: modules_to_save has {saved!r}, which no module of the model is")
    for name in plan:
        module, _, field = name.rpartition(".")
        is_bias = field == "bias" and (
            config["bias"] == "all" or (config["bias"] == "lora_only" and module in targeted)
        )
        if is_saved(config, module) or is_bias:
            expected = f"{module}{_BASE_LAYER}{field}" if module in targeted else name
            if expected not in names:
                option = "bias" if is_bias else "modules_to_save"
                raise CheckpointError(
                    f"{path} is incomplete: it has no {expected}, which {option} = {config[option]!r} promises"
                )


def _is_expected(base_name: str, name: str, config: Mapping[str, Any]) -> bool:
    """Return True if a file with this config stores this tensor of the base."""
    module, _, field = base_name.rpartition(".")
    is_bias = "bias" in field and config["bias"] != "none"
    return is_saved(config, module) or is_bias or _is_embedding_weight(base_name, name)


def _is_embedding_weight(base_name: str, name: str) -> bool:
    """Return True for the weight of an embedding or head under an adapter."""
    return _BASE_LAYER in name and base_name.rpartition(".")[0].rpartition(".")[2] in _EMBEDDING_MODULES


def collect_base_tensors(
    model: Any, tree: Any, table: NameMap, adapter_name: str, targeted: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the base's tensors that the adapter's file stores, by name, and the config's `bias` and `modules_to_save`:
    the values of `model`, or of a tree of its structure, such as gradients, for trainable tensors only.

    The score of a `SequenceScore` is always stored, as PEFT does for the task SEQ_CLS.

    **Raises** `CheckpointError` for a module that has an adapter and a trainable parameter other than a bias, and for a
    score that has an adapter or is quantized.
    """
    base = _plan_base_tensors(model, table)
    copies = _find_trainable_copies(model, adapter_name)
    value_copies = _find_trainable_copies(model if tree is None else tree, adapter_name)
    leaves = jax.tree.leaves(base.base_model)
    tensors = {}
    trainable = {
        name
        for name, planned in base.plan.items()
        if any(_is_applied(copies.get(base.parameter_keys[part.leaf]), part.index) for part in planned.slices)
    }
    all_biases = {name for name in base.plan if "bias" in name.rpartition(".")[2]}
    target_biases = {name for name in all_biases if name.rpartition(".")[0] in targeted}
    options = {"all": all_biases, "lora_only": target_biases}
    option = next((word for word, names in options.items() if names and names <= trainable), "none")
    biases = options.get(option, set())
    saved = {name.rpartition(".")[0] for name in trainable - biases}
    if tree is None and isinstance(model, SequenceScore):  # also one that was frozen: PEFT reads no file without it
        _refuse_score(base.plan, targeted)
        saved.add(_SCORE)
    if both := sorted(saved & targeted):
        raise CheckpointError(
            f"{both[0]} has an adapter, and is trained in full in part: PEFT's files have one of both"
        )
    for name in base.plan:
        module = name.rpartition(".")[0]
        if module not in saved and (whole := next((word for word in saved if is_saved_by(word, module)), None)):
            raise CheckpointError(
                f"{whole} is trained in full, and {name} is not: PEFT's modules_to_save would mean both"
            )
    for name, planned in base.plan.items():
        module, _, field = name.rpartition(".")
        base_layer_name = f"{module}{_BASE_LAYER}{field}"
        is_embedding = tree is None and module in targeted and _is_embedding_weight(name, base_layer_name)
        if name not in biases and module not in saved and not is_embedding:
            continue
        tensor = np.zeros(planned.shape, np.float32)
        views = planned.mapping.views(tensor, planned.part_shapes, planned.num_stacked_dims)
        for part, view in zip(planned.slices, views, strict=True):
            key = base.parameter_keys[part.leaf]
            if key in value_copies and _is_applied(copies[key], part.index):
                view[...] = gather_to_host(value_copies[key].array, part.index).reshape(view.shape)
            elif tree is None:
                view[...] = gather_to_host(leaves[part.leaf], part.index).reshape(view.shape)
        tensors[base_layer_name if module in targeted else name] = tensor
    return tensors, {"bias": option, "modules_to_save": sorted(saved) or None}


def _refuse_score(plan: Mapping[str, TensorPlan], targeted: set[str]) -> None:
    """**Raises** `CheckpointError` for a score with an adapter or a quantized matrix."""
    if _SCORE not in targeted and f"{_SCORE}.weight" in plan:
        return
    found = "has an adapter" if _SCORE in targeted else "is quantized"
    raise CheckpointError(
        f"{_SCORE} {found}, and PEFT trains the score of the task SEQ_CLS in full, always: leave it out of targets= "
        f"and pass modules_to_save=({_SCORE!r},), or merge the adapter and save the model"
    )


def _find_trainable_copies(tree: Any, adapter_name: str) -> dict[_ParameterKey, TrainableCopy]:
    """Return the parameters that an adapter trains in full."""
    keys = walk_parameters(tree, "", (), is_trainable_copy)
    nodes = jax.tree.leaves(tree, is_leaf=is_trainable_copy)
    return {
        key: node
        for key, node in zip(keys, nodes, strict=True)
        if is_trainable_copy(node) and node.adapter_name == adapter_name
    }


def _is_applied(node: TrainableCopy | None, index: tuple[int, ...]) -> bool:
    return node is not None and bool(np.asarray(node.applies)[index])
