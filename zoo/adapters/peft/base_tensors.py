"""What PEFT's files hold beside adapters: biases, modules to save, and the tables under adapters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zoo.models.hf.spec import NameMap
from zoo.models.parameter_paths import IndexRanges, list_parameter_paths, walk_parameters
from zoo.parallel import TrainableCopy
from zoo.parallel.trainable_copy import is_trainable_copy
from zoo.weights import CheckpointError
from zoo.weights.plan import TensorPlan, plan
from zoo.weights.safetensors import LazyTensor
from zoo.weights.save import gather_to_host

from ..compose import strip_adapters

_BASE_LAYER = ".base_layer."
_EMBEDDING_MODULES = ("embed_tokens", "lm_head")
"""Modules whose own weight PEFT saves beside their adapter, since a vocabulary may have grown."""
_ParameterKey = tuple[str, IndexRanges]
"""Our name of one array, and what the stars in it run over: layers whose kinds take turns share names."""
_TrainedValues = dict[_ParameterKey, tuple[np.ndarray, np.ndarray]]
"""In which layers a parameter is learnt, and its numbers in all of them."""


class _BaseTensors(NamedTuple):
    """Tensors of a base that an adapter's file holds too."""

    base_model: Any
    """The model without adapters."""
    plan: Mapping[str, TensorPlan]
    """Their name -> what is in it."""
    parameter_keys: list[_ParameterKey]
    """Of each array of the plain model."""


def _plan_base_tensors(model: Any, table: NameMap) -> _BaseTensors:
    plain = strip_adapters(model)
    return _BaseTensors(plain, plan(plain, table), [place[:2] for place in list_parameter_paths(plain)])


def read_base_tensors(
    model: Any, table: NameMap, tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], path: str
) -> tuple[_TrainedValues, set[str]]:
    """What is learnt as a whole, of tensors by their names in the base; and which of these names were read.

    **Raises** `CheckpointError` for a tensor of another shape, and for a table that another module shares.
    """
    whole, found, read = _plan_base_tensors(model, table), {}, set()
    leaves = jax.tree.leaves(whole.base_model)
    for name, tensor in tensors.items():
        own = name.replace(_BASE_LAYER, ".")
        if own not in whole.plan or not _is_expected(own, name, config):
            continue
        read.add(name)
        planned, numbers = whole.plan[own], np.asarray(tensor.read())
        if numbers.shape != planned.shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {list(numbers.shape)}, and the model's {list(planned.shape)}"
            )
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{path}: {name} has a number that is not finite")
        before = [gather_to_host(leaves[piece.leaf], piece.index) for piece in planned.slices]
        after = planned.mapping.views(np.array(numbers), planned.part_shapes, planned.num_stacked_dims)
        after = [view.reshape(x.shape) for view, x in zip(after, before, strict=True)]
        if _is_embedding_weight(own, name) and all(np.array_equal(x, y) for x, y in zip(before, after, strict=True)):
            continue  # as it is in the base
        tied = getattr(model, "head", True) is None and not config.get("ensure_weight_tying")
        if tied and whole.parameter_keys[planned.slices[0].leaf][0] == "embedding.weight":
            raise CheckpointError(
                f"{path}: {name} is learnt, which is the head here too; PEFT leaves the head as it was unless "
                "ensure_weight_tying is set, which is another model: untie the two in the base"
            )
        for piece, own_numbers in zip(planned.slices, after, strict=True):
            x, ours = leaves[piece.leaf], whole.parameter_keys[piece.leaf]
            if ours not in found:
                stacked = x.shape[: x.ndim - len(piece.shape)]
                found[ours] = np.zeros(stacked, bool), np.array(x, np.float32)
            applies, array = found[ours]
            applies[piece.index], array[piece.index] = True, own_numbers
    return found, read


def _is_expected(base_name: str, name: str, config: Mapping[str, Any]) -> bool:
    """Whether a file with this config has such a tensor of the base."""
    module, _, field = base_name.rpartition(".")
    saved = any(
        module == one or module.endswith(f".{one}") or f".{one}." in f".{module}."
        for one in _get_modules_to_save(config)
    )
    return saved or ("bias" in field and config.get("bias", "none") != "none") or _is_embedding_weight(base_name, name)


def _get_modules_to_save(config: Mapping[str, Any]) -> list[str]:
    return list(config.get("modules_to_save") or ())


def _is_embedding_weight(base_name: str, name: str) -> bool:
    """Whether it is the weight of a table under an adapter."""
    return _BASE_LAYER in name and base_name.rpartition(".")[0].rpartition(".")[2] in _EMBEDDING_MODULES


def collect_base_tensors(
    model: Any, tree: Any, table: NameMap, adapter_name: str, targeted: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors of the base that the file has too, by their names there, and what the config says of them: of `model`,
    or of a tree of its shape, gradients, those that are learnt.

    **Raises** `CheckpointError` where part of what an adapter stands around is learnt as a whole, and is no bias.
    """
    whole = _plan_base_tensors(model, table)
    nodes, ours = (
        _find_trainable_copies(model, adapter_name),
        _find_trainable_copies(model if tree is None else tree, adapter_name),
    )
    leaves, found = jax.tree.leaves(whole.base_model), {}
    learnt = {
        name
        for name, planned in whole.plan.items()
        if any(_is_applied(nodes.get(whole.parameter_keys[piece.leaf]), piece.index) for piece in planned.slices)
    }
    all_biases = {name for name in whole.plan if "bias" in name.rpartition(".")[2]}
    of_targets = {name for name in all_biases if name.rpartition(".")[0] in targeted}
    options = {"all": all_biases, "lora_only": of_targets}
    option = next((word for word, names in options.items() if names and names <= learnt), "none")
    biases = options.get(option, set())
    saved = {name.rpartition(".")[0] for name in learnt - biases}
    if both := sorted(saved & targeted):
        raise CheckpointError(
            f"{both[0]} has an adapter, and is learnt as a whole in part: PEFT's files have one of both"
        )
    for name, planned in whole.plan.items():
        module, _, field = name.rpartition(".")
        of_table = tree is None and module in targeted and _is_embedding_weight(name, f"{module}{_BASE_LAYER}{field}")
        if name not in biases and module not in saved and not of_table:
            continue
        tensor = np.zeros(planned.shape, np.float32)
        views = planned.mapping.views(tensor, planned.part_shapes, planned.num_stacked_dims)
        for piece, view in zip(planned.slices, views, strict=True):
            node = ours.get(whole.parameter_keys[piece.leaf])
            if node is not None and _is_applied(nodes[whole.parameter_keys[piece.leaf]], piece.index):
                view[...] = gather_to_host(node.array, piece.index).reshape(view.shape)
            elif tree is None:
                view[...] = gather_to_host(leaves[piece.leaf], piece.index).reshape(view.shape)
        found[f"{module}{_BASE_LAYER}{field}" if module in targeted else name] = tensor
    return found, {"bias": option, "modules_to_save": sorted(saved) or None}


def _find_trainable_copies(tree: Any, adapter_name: str) -> dict[_ParameterKey, TrainableCopy]:
    """The parameters that are learnt as a whole under a label."""
    named = zip(
        walk_parameters(tree, "", (), is_trainable_copy), jax.tree.leaves(tree, is_leaf=is_trainable_copy), strict=True
    )
    return {at: node for at, node in named if is_trainable_copy(node) and node.adapter_name == adapter_name}


def _is_applied(node: TrainableCopy | None, index: tuple[int, ...]) -> bool:
    return node is not None and bool(np.asarray(node.applies)[index])
