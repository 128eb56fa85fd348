"""Building blocks of the families that encode texts: heads by architecture, and attention in both directions."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.layers.encoders.pooling import DensePooler, take_first_token

from ..build import LayerFactories
from ..encoders.heads import (
    ClassificationHead,
    DenseTransform,
    LateClassificationHead,
    MaskedLMHead,
    TokenClassificationHead,
    average_tokens,
)
from ..encoders.text import Encoder, build_encoder
from ..stack import BlockFactory
from .encoder_heads import HeadFactory, count_classes, make_feature_head_factory, select_head
from .errors import ConfigError
from .spec import Config, NameMap, prefixed

ONLY_ENCODERS = {"is_decoder": (False,), "position_embedding_type": ("absolute",)}
"""Required values of families whose class in transformers may also be a decoder."""

_POOLINGS = {"cls": take_first_token, "bos": take_first_token, "mean": average_tokens}


def make_pooled_head_factory(
    config: Config, transform: Callable[..., DenseTransform] | None, *, pooling: str = "cls"
) -> HeadFactory:
    """Return a factory of a head that classifies texts, by the name of its pooling: `cls`, `bos`, `mean` or `late`.

    **Raises** `ConfigError` for another pooling.
    """
    size = config["hidden_size"]
    classes = count_classes(config)
    if pooling == "late":
        make = partial(TokenClassificationHead, size, classes, transform=transform)
        return lambda key: LateClassificationHead(make(key=key))
    if pooling not in _POOLINGS:
        raise ConfigError(f"classifier_pooling = {pooling!r}, and known are late, {', '.join(_POOLINGS)}")
    return partial(ClassificationHead, size, classes, pool=_POOLINGS[pooling], transform=transform)


def make_token_head_factory(config: Config, transform: Callable[..., DenseTransform] | None = None) -> HeadFactory:
    """Return a factory of a head that classifies tokens."""
    return partial(TokenClassificationHead, config["hidden_size"], count_classes(config), transform=transform)


def make_masked_lm_head_factory(
    config: Config, transform: Callable[..., DenseTransform] | None, *, bias: bool
) -> HeadFactory:
    """Return a factory of a masked-LM head."""
    sizes = (config["hidden_size"], config["vocab_size"])
    tied = config.get("tie_word_embeddings", True)
    return partial(MaskedLMHead, *sizes, transform=transform, tied=tied, bias=bias)


def make_bert_heads(
    config: Config,
    transform: Callable[..., DenseTransform],
    *,
    activation: Callable = jnp.tanh,
    has_pooler: bool = False,
) -> dict[str, HeadFactory]:
    """Return factories of the heads that BERT and its kin have, by what follows the family's prefix in an architecture.

    - `transform`: factory of the dense layer of the masked-LM head.
    - `activation`: of the dense layer that classifies texts.
    - `has_pooler`: give the encoder without a head BERT's pooler.
    """
    size = config["hidden_size"]
    classify = partial(DenseTransform, size, activation=activation)
    pooler = None
    if has_pooler:
        pooler = partial(DensePooler, size, size)
    return {
        "MaskedLM": make_masked_lm_head_factory(config, transform, bias=True),
        "SequenceClassification": make_pooled_head_factory(config, classify),
        "TokenClassification": make_token_head_factory(config),
        "Model": make_feature_head_factory(pooler),
    }


def build_config_encoder(
    config: Config,
    layers: Sequence[LayerFactories | BlockFactory],
    prefix: str,
    heads: dict[str, HeadFactory],
    *,
    key: Key[Array, ""],
    **options: Any,
) -> Encoder:
    """Call `build_encoder` with the sizes of the config, and the head of `heads` that its architecture names: by what
    follows `prefix` and `For`, say `MaskedLM`; `Model` is the encoder without a head.

    **Raises** `ConfigError` for an architecture with another head.
    """
    named = {}
    for kind, head in heads.items():
        infix = "" if kind == "Model" else "For"
        named[f"{prefix}{infix}{kind}"] = head
    sizes = {"vocab": config["vocab_size"], "embed": config["hidden_size"]}
    return build_encoder(layers=layers, head=select_head(config, named), key=key, **sizes, **options)


def map_dense_layer(theirs: str, ours: str, norm: str | None = None) -> dict[str, Any]:
    """Map the dense layer and the norm of a `DenseTransform`."""
    names = {"dense": "linear"}
    if norm is not None:
        names[norm] = "norm"
    return prefixed(theirs, ours, names)


def find_other_heads(
    names: Callable[[Config], NameMap], base: str, heads: tuple[str, ...], config: Config, tensors: Collection[str]
) -> set[str]:
    """Return the tensors below the modules `heads`, within or beside the module `base`, that the config's architecture
    does not have: files of BERT have a masked-LM head, a pooler and more."""
    own = {name.removeprefix(f"{base}.") for name in names(config)}
    is_own = lambda name: name in own or name.rpartition(".")[0] in own
    found = {name: name.removeprefix(f"{base}.") for name in tensors}
    return {name for name, short in found.items() if short.startswith(heads) and not is_own(short)}
