"""Multimodal checkpoints: the language model within them, which a config's `text_config` describes.

A wrapper's class embeds tokens, puts features of images or sounds in some of their places, and calls the language
model. So with text only it computes what the language model computes. In its files the language model has names of its
own, in one of two layouts:

    language_model.model.layers.0...    language_model.lm_head    most files of the hub, and files of transformers 5
    model.language_model.layers.0...    lm_head                   the classes' own names
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from .errors import ConfigError
from .spec import Family, NameMap, Wrapping


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """Facts about the multimodal checkpoints of one `model_type`."""

    text: str
    """The `model_type` of a `text_config` that states none."""
    tied: bool = True
    """The default of `tie_word_embeddings`, which counts at the top of the config and not in `text_config`."""
    reads_inner_tie: bool = False
    """True if `tie_word_embeddings: true` in `text_config` ties, too."""
    scales_logits: bool = False
    """True if its class caps and scales logits as the language model's class does. Others apply only the head."""


WRAPPERS: Mapping[str, Wrapper] = {
    "aya_vision": Wrapper("cohere2"),
    "gemma3": Wrapper("gemma3_text"),
    "gemma3n": Wrapper("gemma3n_text", scales_logits=True),
    "gemma4": Wrapper("gemma4_text", scales_logits=True),
    "internvl": Wrapper("qwen2"),
    "kimi_k25": Wrapper("deepseek_v3"),
    "llama4": Wrapper("llama4_text", tied=False),
    "llava": Wrapper("llama", tied=False, reads_inner_tie=True),
    "llava_next": Wrapper("llama", tied=False, reads_inner_tie=True),
    "mistral3": Wrapper("mistral"),
    "qwen3_5": Wrapper("qwen3_5_text", tied=False),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", tied=False),
    "qwen4_exp": Wrapper("qwen4_exp_text", tied=False),
}
"""By `model_type`. Classes whose language model sees images otherwise than as embeddings, by cross-attention or with
masks of its own for text, are not among them."""

TEXT_CONFIG = "text_config"
PLAIN_LOGITS: Mapping[str, Any] = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
TIE = "tie_word_embeddings"
_INHERITED = (TIE, "quantization_config")
_DTYPES = ("dtype", "torch_dtype")
_BASES = ("model.language_model.", "language_model.model.")


def read_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model: of a wrapper, its `text_config`, with the keys that count at the top.

    `tie_word_embeddings` is filled in by the wrapper's default. Any other config is returned as it is.

    **Raises** `ConfigError` for a wrapper with a `text_config` that is not a table.
    """
    wrapper = find_wrapper(config)
    if wrapper is None:
        return dict(config)
    return read_inner_config(config, wrapper)


def read_inner_config(config: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    """Return the `text_config` of a wrapper, with the keys that count at the top. **Raises** `ConfigError` for one that
    is not a table."""
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{TEXT_CONFIG} = {inner!r} should be a table: the language model's config")
    text = {"model_type": wrapper.text, **inner}
    text.update({key: config[key] for key in _INHERITED if config.get(key) is not None})
    if not any(key in inner for key in _DTYPES):
        text.update({key: config[key] for key in _DTYPES if key in config})
    if config.get(TIE) is None:
        text[TIE] = wrapper.tied or (wrapper.reads_inner_tie and inner.get(TIE) is True)
    elif wrapper.reads_inner_tie and inner.get(TIE) is True:
        text[TIE] = True
    return text


def find_wrapper(config: Mapping[str, Any]) -> Wrapper | None:
    """Return the facts of the wrapper that a config names, None if it names none."""
    name = config.get("model_type")
    if not isinstance(name, str):
        return None
    return WRAPPERS.get(name)


def unwrap_config(
    config: Mapping[str, Any], family: Family, tensors: Collection[str]
) -> tuple[dict[str, Any], Wrapping | None]:
    """Return the config of the language model, and what is needed to write it back into its wrapper: None for a config
    without a wrapper.

    A head among `tensors` is a head of its own unless the config says at the top that it is tied. Caps and scales of
    logits that the wrapper's class leaves out are set to none.

    **Raises** `ConfigError` as `read_text_config` does, and if no tensor has a language model's name.
    """
    wrapper = find_wrapper(config)
    if wrapper is None or family.name == config["model_type"]:
        return dict(config), None
    text = read_inner_config(config, wrapper)
    if not wrapper.scales_logits:
        text.update({key: value for key, value in PLAIN_LOGITS.items() if key in family.defaults})
    base = next((base for base in _BASES if any(name.startswith(base) for name in tensors)), None)
    if base is None:
        raise ConfigError(f"the names of the language model's tensors should begin with {' or '.join(_BASES)}")
    inner_head = any(name.startswith(f"language_model.{family.head}.") for name in tensors)
    outer_head = any(name.startswith(f"{family.head}.") for name in tensors)
    if inner_head or (base == _BASES[1] and not outer_head):
        rest = "language_model."
    else:
        rest = ""
    if config.get(TIE) is None and (inner_head or outer_head):
        text[TIE] = False
    return text, Wrapping(json.dumps(config), json.dumps(text), base, rest)


def wrap_config(text: Mapping[str, Any], wrapping: Wrapping) -> dict[str, Any]:
    """Return a wrapper's config with the language model's new one, `text`, in place of the one that was read.

    Keys that did not change stay as and where they are. A changed key is written where it stood, at the top, in
    `text_config` or both, and a new one in `text_config`.
    """
    config = json.loads(wrapping.config)
    before = json.loads(wrapping.text)
    inner = config[TEXT_CONFIG]
    for key in before.keys() | text.keys():
        if key in text and key in before and text[key] == before[key]:
            continue
        places = [place for place in (config, inner) if key in place]
        if not places:
            places = [config if key in _INHERITED else inner]
        for place in places:
            if key in text:
                place[key] = text[key]
            else:
                place.pop(key, None)
    return config


def is_text_tensor(name: str, family: Family, wrapping: Wrapping | None) -> bool:
    """Return True for a tensor of the language model, by its name in a wrapper's files."""
    return wrapping is None or name.startswith((wrapping.base, wrapping.rest or f"{family.head}."))


def rename(name: str, wrapping: Wrapping | None, base: str = "model.") -> str:
    """Return the name in a wrapper's files of a tensor of the language model. `base` begins the names that are not the
    head's."""
    if wrapping is None:
        return name
    if name.startswith(base):
        return wrapping.base + name.removeprefix(base)
    return wrapping.rest + name


def name_as_modules(wrapping: Wrapping) -> Wrapping:
    """Return a wrapping with the tensor names of the classes in transformers 5, whatever those in its files are."""
    return dataclasses.replace(wrapping, base=_BASES[0], rest="")


def rename_all(name_map: NameMap, wrapping: Wrapping | None) -> NameMap:
    """Return a name map with the names in a wrapper's files."""
    if wrapping is None:
        return name_map
    base = next(iter(name_map)).partition(".")[0] + "."
    return {rename(name, wrapping, base): mapping for name, mapping in name_map.items()}
