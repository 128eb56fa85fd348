"""Heads of encoders by the architecture that a config names: of texts and of images."""

from collections.abc import Callable, Mapping
from typing import Any

from zoo.layers.encoders.pooling import AbstractPooler

from ..encoders.heads import FeatureHead, make_feature_head
from .errors import ConfigError
from .kinds import Default, optional_count, optional_words
from .spec import Config, NameMap
from .values import WORD, optional, table_of

LABEL_KEYS = ("id2label", "num_labels")
"""Keys of classifiers, which families without classifiers do not have."""

HEAD_DEFAULTS: dict[str, Any] = {
    "architectures": optional_words(),
    "id2label": Default(None, optional(table_of(WORD))),
    "num_labels": optional_count(),
}
"""Defaults of the keys that choose and size a head."""

HeadFactory = Callable[..., Any]
"""A function `key= -> head`."""


def find_head_kind(config: Config, prefix: str) -> str:
    """Return the head of the config's architecture: `MaskedLM` for `BertForMaskedLM`, `Model` for `BertModel`, and
    `MaskedLM` if it names none."""
    names = [name for name in config["architectures"] or [] if name.startswith(prefix)]
    if not names:
        return "MaskedLM"
    return names[0].removeprefix(prefix).removeprefix("For")


def select_head(config: Config, heads: Mapping[str, HeadFactory]) -> HeadFactory:
    """Return the head of the config's architecture; the first of `heads` if it names none.

    **Raises** `ConfigError` for an architecture with another head.
    """
    names = config["architectures"] or list(heads)[:1]
    known = [name for name in names if name in heads]
    if not known:
        raise ConfigError(f"architectures = {names}, and the supported heads are {' and '.join(heads)}")
    return heads[known[0]]


def select_names(config: Config, prefix: str, heads: Mapping[str, NameMap]) -> NameMap:
    """Return the names of the head of the config's architecture."""
    return heads[find_head_kind(config, prefix)]


def count_classes(config: Config) -> int:
    """Return the number of classes that `id2label` names, or `num_labels`. **Raises** `ConfigError` if they differ."""
    labels = config["id2label"]
    count = config["num_labels"]
    if labels is not None and count not in (None, len(labels)):
        raise ConfigError(f"num_labels = {count}, and id2label has {len(labels)} labels")
    if labels is not None:
        return len(labels)
    return count or 2  # transformers' default


def name_label_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a config with the `label2id` of its `id2label`, which transformers reads apart."""
    labels = config.get("id2label")
    if not isinstance(labels, Mapping) or "label2id" in config:
        return dict(config)
    labels = {str(number): name for number, name in labels.items()}
    return {**config, "id2label": labels, "label2id": {name: int(number) for number, name in labels.items()}}


def make_feature_head_factory(pooler: Callable[..., AbstractPooler] | None = None) -> HeadFactory:
    """Return a factory of a `FeatureHead`; `pooler` is the factory of its pooler, called with `key=`, if it has one."""

    if pooler is None:
        return make_feature_head
    return lambda key: FeatureHead(pooler(key=key))
