"""Names that modules have in a family's checkpoints, which are their names in PEFT's files: `q_proj` for `query`.

The names come from the name table of the model family. A fused projection is one module there, and several layers
here. Experts whose matrices are one parameter in PyTorch (`target_parameters`) have the module that holds it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax

from zoo.models.hf.spec import NameMap, Origin, TensorMapping, prefixed
from zoo.models.hf.wrappers import name_as_modules, rename
from zoo.models.parameter_paths import format_path, iterate_indices
from zoo.models.targets import ALL_LINEAR, LinearSite, Targets, find_linears, matches, suggest_words
from zoo.parallel.trainable_copy import is_trainable_copy
from zoo.weights.plan import invert_name_map, name_in_memory
from zoo.weights.safetensors import CheckpointError
from zoo.weights.save import resolve_origin
from zoo.weights.stages import read_callers, read_name_map

from .base import get_base_layer, is_adapter
from .dequantize import dequantize
from .merged_layers import restore_adapters
from .methods.state import remove_state


class PeftModule(NamedTuple):
    """A module in PEFT's naming, and our layer that it holds, or that is one part of it if the module is fused."""

    peft_name: str
    site: LinearSite
    index: tuple[int, ...]
    mapping: TensorMapping
    part: int
    part_sizes: tuple[int, ...]
    """Number of outputs of each part."""
    parameter: str = ""
    """Name of the parameter that `target_parameters` may name: all experts' matrices. "" for one that has none."""
    row: int = 0
    """Number of the row of the family's name table."""

    @property
    def num_experts(self) -> int:
        """Number of experts whose matrices the module holds, 1 for a module of its own."""
        return len(self.site.ranges[-1]) if self.holds_experts else 1

    @property
    def holds_experts(self) -> bool:
        """True if the module holds the matrices of all experts of a layer."""
        return bool(self.parameter) and len(self.site.ranges) > 1

    @property
    def pattern_name(self) -> str:
        """The name that `rank_pattern` and `alpha_pattern` are compared with."""
        return self.parameter or self.peft_name


def list_peft_modules(model: Any, table: NameMap) -> Iterator[PeftModule]:
    """Yield every linear layer and embedding of a model, one per layer, with its module name in PEFT's files. Experts
    whose matrices are one parameter in `table` have the module that holds it."""
    mappings = invert_name_map(table)
    sites = find_linears(model, include_embeddings=True)
    rows = {pattern: number for number, pattern in enumerate(prefixed("", "", table))}
    num_outputs = {site.name: site.get_shape()[0] for site in sites}
    for site in sites:
        name = site.name if site.name in mappings else f"{site.name}.weight"
        if name not in mappings:
            continue
        pattern, mapping, part = mappings[name]
        part_sizes = tuple(num_outputs[part.removesuffix(".weight")] for part in mapping.parts)
        stars = pattern.count("*")
        is_parameter = name != site.name
        if (is_parameter, stars) not in ((False, len(site.ranges)), (True, len(site.ranges) - 1)):
            continue  # all experts in the weight of one module, which PEFT does not know
        for index, indices in iterate_indices(site.ranges):
            path = format_path(pattern, indices[:stars])
            peft_name = path.rpartition(".")[0] if is_parameter else path
            parameter = path if is_parameter else ""
            yield PeftModule(peft_name, site, index, mapping, part, part_sizes, parameter, rows[pattern])


def nest_parameters(modules: Sequence[PeftModule]) -> list[PeftModule]:
    """Return the modules as PEFT names them if each of them has an adapter. It wraps a module once per targeted
    parameter, in their order: the wrapper of the first is the `base_layer` of the wrapper of the second."""
    rows_by_holder: dict[str, set[int]] = {}
    for module in modules:
        if module.holds_experts:
            rows_by_holder.setdefault(module.peft_name, set()).add(module.row)

    def nest(module: PeftModule) -> PeftModule:
        depth = sum(row > module.row for row in rows_by_holder.get(module.peft_name, ()))
        return module._replace(peft_name=module.peft_name + ".base_layer" * depth)

    return [nest(module) if module.holds_experts else module for module in modules]


def get_name_table(model: Any, *, in_memory: bool = False) -> NameMap:
    """Return the tensor names of a model's family: the names in files, or, if `in_memory`, the names of the modules
    that transformers 5 builds, where all experts of a layer are one parameter. Of a language model in a multimodal
    checkpoint, names always begin as the modules of transformers 5 do."""
    origin = _resolve_module_origin(model)
    if in_memory:
        origin = dataclasses.replace(origin, family=name_in_memory(origin.family))
    return read_name_map(origin)


def get_family_name(model: Any) -> str:
    """Return the `model_type` of a model's family."""
    return _resolve_module_origin(model).family.name


def get_callers(model: Any) -> Mapping[str, str]:
    """Return the names of modules that layers share, in each later layer that calls one -> in the first."""
    return read_callers(_resolve_module_origin(model))


def get_embedding_and_head_names(model: Any) -> tuple[str, str]:
    """Return the module names of the embedding and of the head, which need not be a separate module here."""
    origin = _resolve_module_origin(model)
    mappings = invert_name_map(read_name_map(origin))
    embedding, _, _ = mappings.get("embedding") or mappings["embedding.weight"]
    head = rename(f"{origin.family.head}.weight", origin.wrapping)
    return embedding.removesuffix(".weight"), head.removesuffix(".weight")


def _resolve_module_origin(model: Any) -> Origin:
    """Return a model's origin; in a multimodal checkpoint with the names of the modules of transformers 5."""
    origin = resolve_origin(_get_base_shapes(model), None, {})
    if origin.wrapping is None:
        return origin
    return dataclasses.replace(origin, wrapping=name_as_modules(origin.wrapping))


def _get_base_shapes(model: Any) -> Any:
    """Return the shapes of a model without adapters and quantization, without computing any array."""
    model = remove_state(restore_adapters(model))
    model = jax.tree.map(lambda node: node.base if is_trainable_copy(node) else node, model, is_leaf=is_trainable_copy)
    return eqx.filter_eval_shape(dequantize, jax.tree.map(get_base_layer, model, is_leaf=is_adapter))


def translate_targets(model: Any, targets: Targets, sites: Sequence[LinearSite]) -> Targets:
    """Return targets in the paths of this library. A target that matches none of them, but matches modules in the
    checkpoints of the model's family, becomes the paths of these modules: GPT-2's `c_attn` becomes query, key and
    value, and `experts.down_proj` becomes `down` in all experts.

    **Raises** `ValueError` for a target that matches neither, with similar names.
    """
    if callable(targets):
        return targets
    own = {name for site in sites for name in site.list_names().values()}
    given = [targets] if isinstance(targets, str) else list(targets)
    unknown = [target for target in given if not any(matches(target, name) for name in own)]
    if not unknown:
        return targets
    names = [(theirs, ours) for theirs, ours in _list_checkpoint_names(model) if ours in own]
    paths = {
        target: list(dict.fromkeys(ours for theirs, ours in names if matches(target, theirs))) for target in unknown
    }
    for target in unknown:
        if not paths[target]:
            raise ValueError(
                f"no matrix of the model is meant by the target {target!r}. {_suggest(target, sites, names)}"
            )
    return [path for target in given for path in paths.get(target, [target])]


def translate_patterns(model: Any, patterns: Mapping[str, Any] | None, sites: Sequence[LinearSite]) -> dict[str, Any]:
    """Return a table of values by target, such as `rank_pattern`, in the paths of this library."""
    translated: dict[str, Any] = {}
    for pattern, value in (patterns or {}).items():
        paths = translate_targets(model, pattern, sites)
        for path in [paths] if isinstance(paths, str) or callable(paths) else paths:
            translated.setdefault(str(path), value)
    return translated


def _list_checkpoint_names(model: Any) -> Iterator[tuple[str, str]]:
    """Yield pairs of a module's name in checkpoints and its path here. No pairs for a model of no family."""
    try:
        tables = [get_name_table(model, in_memory=in_memory) for in_memory in (False, True)]
    except CheckpointError:
        return
    for table in tables:
        for module in list_peft_modules(model, table):
            indices = tuple(run[i] for run, i in zip(module.site.ranges, module.index, strict=True))
            yield module.parameter or module.peft_name, format_path(module.site.name, indices)


def _suggest(target: str, sites: Sequence[LinearSite], names: Sequence[tuple[str, str]]) -> str:
    """Suggest similar names, and list all names of this library and of checkpoints."""
    ours = sorted({site.name.rpartition(".")[2] for site in sites})
    theirs = sorted({name.rpartition(".")[2] for name, _ in names})
    suggestion = suggest_words(target, [*ours, *(word for word in theirs if word not in ours)])
    if names:
        note = ""
    else:
        note = " The model is of no family, so that it has no names of PEFT's."
    return f"{suggestion[:-1]}, or {ALL_LINEAR!r}.{note}"
