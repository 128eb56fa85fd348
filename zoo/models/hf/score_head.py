"""Decoders that score texts: `XForSequenceClassification` of transformers, with a `score.weight` for a head.

All of them are one head, so each family that has such a class becomes another family here, with the same decoder.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Key

from ..sequence_score import SequenceScore
from .encoder_heads import HEAD_DEFAULTS, count_classes, name_label_ids
from .errors import ConfigError
from .families import FAMILIES
from .spec import Config, Family, NameMap, Origin
from .wrappers import TEXT_CONFIG, find_wrapper

_NAMES = frozenset(
    """
    arcee axk1 biogpt bloom deepseek_v2 deepseek_v3 diffllama exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_oss gptj helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe llama minimax
    ministral ministral3 mistral mistral4 mixtral mpt nemotron olmo olmo2 olmo3 opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2 zamba zamba2
    """.split()
)
"""Families with such a class in transformers 5.24."""
_ARCHITECTURES = {
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
}
"""Classes that are not named as the language model's."""
_ENDING = "ForSequenceClassification"
_LANGUAGE_MODEL_ENDINGS = ("ForCausalLM", "LMHeadModel")
_OTHER_ENDINGS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")


def choose_head(family: Family, config: Mapping[str, Any]) -> Family:
    """Return the family with the head of the config's architecture: the family itself, or with a score of texts.

    **Raises** `ConfigError` for a head that is not read.
    """
    names = config.get("architectures")
    if "architectures" in family.defaults or not isinstance(names, list | tuple) or not names:
        return family  # an encoder's family has its heads itself
    name = str(names[0])
    if name.endswith(_OTHER_ENDINGS):
        raise ConfigError(
            f"architectures = {names}: of decoders, heads are read that predict the next token, {family.architecture}, "
            f"and that score a text, {_name_architecture(family)}"
        )
    if not name.endswith(_ENDING):
        return family
    if (wrapper := find_wrapper(config)) is not None:
        text = FAMILIES[(config.get(TEXT_CONFIG) or {}).get("model_type", wrapper.text)]
        raise ConfigError(
            f"architectures = {names}: a multimodal model that scores texts is not read, only its language model: "
            f"save it as {_name_architecture(text)}"
        )
    return score_family(family)


def has_score(family: Family) -> bool:
    """Return True for a family with such a class, or with this head already; of one's own families, for all."""
    return family.name in _NAMES or FAMILIES.get(family.name) is not family


@functools.cache
def score_family(family: Family) -> Family:
    """Return the family whose models are `SequenceScore`s of this family's decoders; the family itself if they are.

    **Raises** `ConfigError` for a family without such a class in transformers.
    """
    if family.architecture.endswith(_ENDING):
        return family
    if not has_score(family):
        raise ConfigError(
            f"transformers has no {_name_architecture(family)}. Texts are scored with the families "
            f"{', '.join(sorted(_NAMES))}"
        )

    def build(config: Config, *, key: Key[Array, ""]) -> SequenceScore:
        decoder_key, score_key = jax.random.split(key)
        decoder = family.build(config, key=decoder_key)
        return SequenceScore.from_decoder(decoder, count_classes(config), key=score_key)

    def describe(model: Any) -> dict[str, Any]:
        if not isinstance(model, SequenceScore):
            raise ConfigError(f"{type(model).__name__} is not a SequenceScore")
        assert family.describe is not None
        return {**family.describe(model.decoder), **_name_labels(model)}

    return dataclasses.replace(
        family,
        architecture=_name_architecture(family),
        build=build,
        names=functools.partial(_add_score, family.names),
        memory_names=None if family.memory_names is None else functools.partial(_add_score, family.memory_names),
        defaults={**family.defaults, **HEAD_DEFAULTS},
        describe=None if family.describe is None else describe,
        predictors=None,
    )


def is_of_transformers(family: Family) -> bool:
    """Return True for a family of this library, also with a score of texts; False for a family of one's own."""
    known = FAMILIES.get(family.name)
    return known is family or (family.name in _NAMES and known is not None and score_family(known) is family)


def score_origin(origin: Origin, model: SequenceScore) -> Origin:
    """Return the origin of a model that was made from a language model, with the class and the labels of its own; the
    origin itself of a model that was read as such.

    **Raises** `ConfigError` as `score_family`.
    """
    family = score_family(origin.family)
    if family is origin.family:
        return origin
    config = json.loads(origin.config)
    if origin.wrapping is not None:
        config["model_type"] = family.name
    config["architectures"] = [family.architecture]
    labels = config.get("id2label")
    if not isinstance(labels, Mapping) or len(labels) != model.score.out_size:
        config.pop("num_labels", None)
        config.update(_name_labels(model))
    return dataclasses.replace(
        origin, family=family, config=json.dumps(config), wrapping=None, lacks_base_prefix=False, left_aside=""
    )


def _name_labels(model: SequenceScore) -> dict[str, Any]:
    """Return the labels that transformers gives to classes without names."""
    return name_label_ids({"id2label": {number: f"LABEL_{number}" for number in range(model.score.out_size)}})


def _name_architecture(family: Family) -> str:
    """Return the name of the class that scores texts."""
    if family.name in _ARCHITECTURES:
        return _ARCHITECTURES[family.name]
    name = family.architecture
    for ending in _LANGUAGE_MODEL_ENDINGS:
        name = name.removesuffix(ending)
    return name + _ENDING


def _add_score(names: Any, config: Config) -> NameMap:
    """Return a decoder's names with the head's. The row of the language model's head fits no parameter."""
    return {**names(config), "score": "score"}
