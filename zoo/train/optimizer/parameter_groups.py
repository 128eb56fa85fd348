"""Groups of parameters, each with an optimizer of its own, by dims, owners or names."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from zoo._terminal import align_columns
from zoo.models import list_parameter_paths
from zoo.models.parameter_paths import ParameterPath
from zoo.models.targets import suggest_words
from zoo.parallel import Module

DEFAULT = "default"
"""Name of the group of all other parameters."""


def by_dim(
    groups: Mapping[str, optax.GradientTransformation], *, default: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that updates each group of parameters by its own, and all others by `default`.

        groups = {"vocab": optax.adamw(1e-3), "choices": optax.adamw(1e-4)}
        optimizer = train.by_dim(groups, default=train.muon(schedule, mesh=mesh))
        print(train.format_groups(groups, zoo.trainable(model)))

    A group is named by what its parameters share; a parameter is in the first group whose name fits it:

    - a dim: `"vocab"` are embeddings and heads, `"experts"` all experts, `"choices"` the routers.
    - a class that owns the array, or a base class of it: `"RMSNorm"`, `"AbstractLinear"`.
    - a path as in `zoo.models.list_parameter_paths`, its end, or a regular expression for all of it:
      `"attention.query"`, `r"layers.*bias"`. Layers are stacked, so a path has a star for their numbers.

    **Raises** `ValueError` for a group named "default". `init` **raises** `ValueError` for a group without parameters,
    with similar names.
    """
    if DEFAULT in groups:
        raise ValueError(f"{DEFAULT!r} is the name of the group of all other parameters: pass default=")
    return optax.partition({**groups, DEFAULT: default}, lambda params: label_groups(groups, params))


def label_groups(groups: Iterable[str], params: PyTree) -> PyTree[str]:
    """Return the group of every parameter, as `by_dim` takes them. **Raises** `ValueError` for a group without
    parameters."""
    groups = list(groups)
    paths = list_parameter_paths(params)
    labels = [next((group for group in groups if _fits(group, path)), DEFAULT) for path in paths]
    for group in groups:
        if group not in labels:
            _refuse_empty(group, groups, paths)
    return jax.tree.unflatten(jax.tree.structure(params), labels)


def format_groups(groups: Iterable[str], params: PyTree, opt_state: Any = None) -> str:
    """Return a table of the groups of `by_dim`: parameters, arrays, learning rate and names of the arrays.

    The learning rate is known for optimizers made by `optax.inject_hyperparams`, from the `opt_state` of `by_dim`.
    """
    labels = jax.tree.leaves(label_groups(groups, params))
    members = list(zip(labels, list_parameter_paths(params), jax.tree.leaves(params), strict=True))
    rows = [["group", "parameters", "arrays", "rate", "names"]]
    for group in dict.fromkeys([*groups, DEFAULT]):
        arrays = [(path.name, x.size) for label, path, x in members if label == group]
        names = ", ".join(dict.fromkeys(name for name, _ in arrays))
        rate = _format_rate(group, opt_state)
        rows.append([group, f"{sum(size for _, size in arrays):,}", str(len(arrays)), rate, names])
    return "\n".join(line.rstrip() for line in align_columns(rows, right={1, 2, 3}))


def _fits(group: str, path: ParameterPath) -> bool:
    if any(dim.name == group for dim in path.dims) or group in _list_owners(path):
        return True
    module = path.name.rpartition(".")[0]
    if any(name == group or name.endswith(f".{group}") for name in (path.name, module)):
        return True
    try:
        return re.fullmatch(group, path.name) is not None
    except re.error as error:
        raise ValueError(f"the group {group!r} is neither a name nor a valid pattern: {error}") from None


def _list_owners(path: ParameterPath) -> list[str]:
    """Return the names of the class that owns an array and of its base classes up to `Module`."""
    if path.leaf.owner is None:
        return []
    return [base.__name__ for base in path.leaf.owner.__mro__ if issubclass(base, Module) and base is not Module]


def _refuse_empty(group: str, groups: list[str], paths: list[ParameterPath]) -> None:
    """**Raises** `ValueError` that says why a group has no parameters."""
    if fitting := [path for path in paths if _fits(group, path)]:
        earlier = next(other for other in groups if _fits(other, fitting[0]))
        raise ValueError(
            f"the group {group!r} has no parameters: {earlier!r}, which comes before it, has {fitting[0].name}. "
            f"Name {group!r} first"
        )
    words = {dim.name for path in paths for dim in path.dims}
    words.update(*(_list_owners(path) for path in paths))
    words.update(*(path.name.split(".") for path in paths))
    known = sorted(word for word in words if word.isidentifier())
    raise ValueError(f"no parameter has the dim, owner or name {group!r}. {suggest_words(group, known)}")


def _format_rate(group: str, opt_state: Any) -> str:
    """Return the learning rate in the state of a group, or "-"."""
    if opt_state is None:
        return "-"
    found = optax.tree.get_all_with_path(opt_state.inner_states[group], "learning_rate")
    rates = [f"{float(rate):.3g}" for _, rate in found if eqx.is_array(rate)]  # not the states of schedules
    return ", ".join(rates) or "-"
