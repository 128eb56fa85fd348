"""What PEFT's files hold beside adapters: biases, modules to save, and the tables under adapters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zoo.models.facts import Table
from zoo.models.names import Numbers, places, walk
from zoo.parallel import Learnt
from zoo.parallel.learnt import is_learnt_whole
from zoo.weights import CheckpointError
from zoo.weights.plan import Planned, plan
from zoo.weights.save import on_host
from zoo.weights.tensors import Tensor

from .several import plain_of

BASE = ".base_layer."
TABLES = ("embed_tokens", "lm_head")
"""Modules whose own weight PEFT saves beside their adapter, since a vocabulary may have grown."""
Parameter = tuple[str, Numbers]
"""Our name of one array, and what the stars in it run over: layers whose kinds take turns share names."""
Values = dict[Parameter, tuple[np.ndarray, np.ndarray]]
"""In which layers a parameter is learnt, and its numbers in all of them."""


class Whole(NamedTuple):
    """Tensors of a base that an adapter's file holds too."""

    plain: Any
    """The model without adapters."""
    planned: Mapping[str, Planned]
    """Their name -> what is in it."""
    ours: list[Parameter]
    """Of each array of the plain model."""


def whole_of(model: Any, table: Table) -> Whole:
    plain = plain_of(model)
    return Whole(plain, plan(plain, table), [place[:2] for place in places(plain)])


def values(
    model: Any, table: Table, tensors: Mapping[str, Tensor], config: Mapping[str, Any], place: str
) -> tuple[Values, set[str]]:
    """What is learnt as a whole, of tensors by their names in the base; and which of these names were read.

    **Raises** `CheckpointError` for a tensor of another shape, and for a table that another module shares.
    """
    whole, found, read = whole_of(model, table), {}, set()
    leaves = jax.tree.leaves(whole.plain)
    for name, tensor in tensors.items():
        own = name.replace(BASE, ".")
        if own not in whole.planned or not expected(own, name, config):
            continue
        read.add(name)
        planned, numbers = whole.planned[own], np.asarray(tensor.read())
        if numbers.shape != planned.shape:
            raise CheckpointError(
                f"{place}: {name} has the shape {list(numbers.shape)}, and the model's {list(planned.shape)}"
            )
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{place}: {name} has a number that is not finite")
        before = [on_host(leaves[piece.leaf], piece.index) for piece in planned.pieces]
        after = planned.row.views(np.array(numbers), planned.parts, planned.lead)
        after = [view.reshape(x.shape) for view, x in zip(after, before, strict=True)]
        if is_table(own, name) and all(np.array_equal(x, y) for x, y in zip(before, after, strict=True)):
            continue  # as it is in the base
        tied = getattr(model, "head", True) is None and not config.get("ensure_weight_tying")
        if tied and whole.ours[planned.pieces[0].leaf][0] == "embedding.weight":
            raise CheckpointError(
                f"{place}: {name} is learnt, which is the head here too; PEFT leaves the head as it was unless "
                "ensure_weight_tying is set, which is another model: untie the two in the base"
            )
        for piece, own_numbers in zip(planned.pieces, after, strict=True):
            x, ours = leaves[piece.leaf], whole.ours[piece.leaf]
            if ours not in found:
                stacked = x.shape[: x.ndim - len(piece.shape)]
                found[ours] = np.zeros(stacked, bool), np.array(x, np.float32)
            applies, array = found[ours]
            applies[piece.index], array[piece.index] = True, own_numbers
    return found, read


def expected(own: str, name: str, config: Mapping[str, Any]) -> bool:
    """Whether a file with this config has such a tensor of the base."""
    module, _, field = own.rpartition(".")
    saved = any(module == one or module.endswith(f".{one}") or f".{one}." in f".{module}." for one in saved_in(config))
    return saved or ("bias" in field and config.get("bias", "none") != "none") or is_table(own, name)


def saved_in(config: Mapping[str, Any]) -> list[str]:
    return list(config.get("modules_to_save") or ())


def is_table(own: str, name: str) -> bool:
    """Whether it is the weight of a table under an adapter."""
    return BASE in name and own.rpartition(".")[0].rpartition(".")[2] in TABLES


def written(
    model: Any, tree: Any, table: Table, label: str, targeted: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors of the base that the file has too, by their names there, and what the config says of them: of `model`,
    or of a tree of its shape, gradients, those that are learnt.

    **Raises** `CheckpointError` where part of what an adapter stands around is learnt as a whole, and is no bias.
    """
    whole = whole_of(model, table)
    nodes, ours = learnt_in(model, label), learnt_in(model if tree is None else tree, label)
    leaves, found = jax.tree.leaves(whole.plain), {}
    learnt = {
        name
        for name, planned in whole.planned.items()
        if any(applies(nodes.get(whole.ours[piece.leaf]), piece.index) for piece in planned.pieces)
    }
    all_biases = {name for name in whole.planned if "bias" in name.rpartition(".")[2]}
    of_targets = {name for name in all_biases if name.rpartition(".")[0] in targeted}
    options = {"all": all_biases, "lora_only": of_targets}
    option = next((word for word, names in options.items() if names and names <= learnt), "none")
    biases = options.get(option, set())
    saved = {name.rpartition(".")[0] for name in learnt - biases}
    if both := sorted(saved & targeted):
        raise CheckpointError(
            f"{both[0]} has an adapter, and is learnt as a whole in part: PEFT's files have one of both"
        )
    for name, planned in whole.planned.items():
        module, _, field = name.rpartition(".")
        of_table = tree is None and module in targeted and is_table(name, f"{module}{BASE}{field}")
        if name not in biases and module not in saved and not of_table:
            continue
        tensor = np.zeros(planned.shape, np.float32)
        views = planned.row.views(tensor, planned.parts, planned.lead)
        for piece, view in zip(planned.pieces, views, strict=True):
            node = ours.get(whole.ours[piece.leaf])
            if node is not None and applies(nodes[whole.ours[piece.leaf]], piece.index):
                view[...] = on_host(node.array, piece.index).reshape(view.shape)
            elif tree is None:
                view[...] = on_host(leaves[piece.leaf], piece.index).reshape(view.shape)
        found[f"{module}{BASE}{field}" if module in targeted else name] = tensor
    return found, {"bias": option, "modules_to_save": sorted(saved) or None}


def learnt_in(tree: Any, label: str) -> dict[Parameter, Learnt]:
    """The parameters that are learnt as a whole under a label."""
    named = zip(walk(tree, "", (), is_learnt_whole), jax.tree.leaves(tree, is_leaf=is_learnt_whole), strict=True)
    return {at: node for at, node in named if is_learnt_whole(node) and node.label == label}


def applies(node: Learnt | None, index: tuple[int, ...]) -> bool:
    return node is not None and bool(np.asarray(node.applies)[index])
