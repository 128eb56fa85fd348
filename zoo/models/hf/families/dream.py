"""Dream (Ye et al., arXiv:2508.15487): a diffusion language model with Qwen2's layers and attention in both directions.

The logits at a place are of the next token, as in Qwen2, from which it was trained. A sampler shifts them right by one,
`concatenate([logits[:, :1], logits[:, :-1]], axis=1)`, before it reads masked places.
"""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama, qwen2
from .llada import build_denoiser


def _build_dream(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    return build_denoiser(config, bias=True, key=key)


def _map_dream_names(config: hf.Config) -> hf.NameMap:
    attention = hf.prefixed("self_attn", "bidirectional_attention", llama.ATTENTION_NAMES)
    names = llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), attention)
    return {**names, "lm_head": "head.decoder"}


DREAM = hf.Family(
    name="dream",
    architecture="DreamModel",
    build=_build_dream,
    names=_map_dream_names,
    defaults=hf.omit(qwen2.DEFAULTS, "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    required_values={
        "architectures": (None, ["DreamModel"]),
        "use_mrope": (False,),
        "use_sliding_window": (False,),
    },
    ignored_keys=frozenset({"max_window_layers", "sliding_window"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
