"""Replace linear layers by layers that multiply in FP8 or FP4, and back."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from zoo.layers import AbstractMixer, Linear
from zoo.layers.quantized.fp8 import FP8Linear
from zoo.models.parameter_paths import IndexRanges, list_modules, list_parameter_paths, map_modules
from zoo.models.targets import (
    ALL_LINEAR,
    LinearSite,
    Targets,
    find_linears,
    is_linear_site,
    match_targets,
    vmap_stacked,
)
from zoo.ops.quantized.per_tensor import CurrentScaling
from zoo.ops.quantized.recipe import AbstractRecipe
from zoo.parallel.trainable_copy import TrainableCopy

_Model = TypeVar("Model")
_DEFAULT_RECIPE = CurrentScaling()


def fp8(model: _Model, recipe: AbstractRecipe = _DEFAULT_RECIPE, *, targets: Targets = ALL_LINEAR) -> _Model:
    """Replace linear layers by `FP8Linear`s, whose forward and backward products run in FP8 (or FP4), by `recipe`.

        model = zoo.precision.fp8(model)
        loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch)

    Parameters, their names and dtypes stay: they are the master weights. Adapters wrap the layers as any others.

    - `targets`: names, patterns, or a predicate of module paths: see `zoo.models.targets.match_targets`. `"all-linear"`
      excludes the head, layers that are declared in full precision, such as routers, and layers that are multiplied
      head by head. Name the first two to include them.

    **Raises** `ValueError` for a target that matches nothing, and one error for all layers that cannot be replaced: not
    a plain `Linear`, stacked with layers that `targets` exclude, trained in full beside adapters, multiplied head by
    head, or experts or a head for which the recipe has no scales.
    """
    sites = find_linears(model)
    paths = list_parameter_paths(model)
    is_target = match_targets(targets, sites)
    per_head = _find_per_head_names(model)
    excluded = set()
    if targets == ALL_LINEAR:
        excluded = per_head.union(path.name.removesuffix(".weight") for path in paths if path.leaf.full_precision)
    selected = [site for site in sites if site.name not in excluded and site.tabulate(is_target, bool).any()]
    stacked_dims = {path.name: tuple(dim.name for dim in path.dims[-2 - len(path.ranges) : -2]) for path in paths}
    errors = [
        f"{site.name}: {reason}"
        for site in selected
        for reason in _find_errors(site, is_target, recipe, stacked_dims.get(f"{site.name}.weight", ()), per_head)
    ]
    if errors:
        raise ValueError(f"these cannot be multiplied by the recipe {type(recipe).__name__}:\n  " + "\n  ".join(errors))
    names = {site.name for site in selected}

    def replace(name: str, ranges: IndexRanges, module: Any) -> Any:
        if name not in names:
            return module
        dims = stacked_dims[f"{name}.weight"]
        return vmap_stacked(lambda linear: FP8Linear(linear, recipe, stacked_dims=dims), ranges)(module)

    return map_modules(replace, model, is_linear_site)


def remove_fp8(model: _Model) -> _Model:
    """Replace every `FP8Linear` by the `Linear` of its parameters, beneath adapters too."""
    return jax.tree.map(_to_plain, model, is_leaf=lambda node: isinstance(node, FP8Linear))


def _to_plain(node: Any) -> Any:
    if isinstance(node, FP8Linear):
        return node.to_linear()
    return node


def _find_per_head_names(model: Any) -> set[str]:
    """Return the names of the linear layers that their mixers multiply head by head."""
    is_mixer = lambda node: isinstance(node, AbstractMixer)
    mixers = list_modules(model, is_mixer)
    return {f"{name}.{field}" for name, _, mixer in mixers for field in mixer.per_head_linears}


def _find_errors(
    site: LinearSite,
    is_target: Callable[[str], bool],
    recipe: AbstractRecipe,
    stacked_dims: tuple[str, ...],
    per_head: set[str],
) -> Iterator[str]:
    """Yield the reasons why a target module cannot be replaced."""
    is_targeted = site.tabulate(is_target, bool)
    method = type(recipe).__name__
    if not is_targeted.all():
        yield f"targets mean {is_targeted.sum()} of the {is_targeted.size} that are one array: target all or none"
    if type(site.module) is not Linear:
        yield (
            f"it is {type(site.module).__name__}, and no Linear: packed weights stay packed, and adapters come after "
            "zoo.precision.fp8"
        )
    elif isinstance(site.module.weight, TrainableCopy):
        yield "it is trained in full beside adapters: call zoo.precision.fp8 before them"
    if site.name in per_head:
        yield "its mixer multiplies it head by head: leave it out"
    if "experts" in stacked_dims and not recipe.supports_experts:
        yield f"{method} quantizes no experts: take CurrentScaling, or leave them out"
    if recipe.history_length and site.name == "head":
        yield f"a loss calls the head in parts, and {method} observes one call per step: leave it out"
