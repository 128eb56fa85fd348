"""Targets by the names that modules have in a family's checkpoints, and so in PEFT's configs: `q_proj` for `query`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo.models.parameter_paths import format_path
from zoo.models.targets import ALL_LINEAR, LinearSite, Targets, matches, suggest_words
from zoo.weights import CheckpointError


def translate_targets(model: Any, targets: Targets, sites: Sequence[LinearSite]) -> Targets:
    """Return targets in the paths of this library. A target that matches none of them, but modules in the checkpoints
    of the model's family, becomes the paths of these: GPT-2's `c_attn` those of query, key and value,
    `experts.down_proj` those of `down` in all experts.

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
    from .names import get_name_table, list_peft_modules  # it imports the methods, which import this file

    try:
        tables = [get_name_table(model, in_memory=in_memory) for in_memory in (False, True)]
    except CheckpointError:
        return
    for table in tables:
        for module in list_peft_modules(model, table):
            indices = tuple(run[i] for run, i in zip(module.site.ranges, module.index, strict=True))
            yield module.parameter or module.peft_name, format_path(module.site.name, indices)


def _suggest(target: str, sites: Sequence[LinearSite], names: Sequence[tuple[str, str]]) -> str:
    """Suggest similar names, and list all: those of this library, and those of checkpoints."""
    last_words = lambda paths: sorted({path.rpartition(".")[2] for path in paths})
    ours, theirs = last_words(site.name for site in sites), last_words(name for name, _ in names)
    suggestion = suggest_words(target, [*ours, *(word for word in theirs if word not in ours)])
    note = "" if names else " The model is of no family, so that it has no names of PEFT's."
    return f"{suggestion[:-1]}, or {ALL_LINEAR!r}.{note}"
