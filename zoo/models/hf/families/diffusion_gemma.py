"""DiffusionGemma (Gemma team, 2026): Gemma 4's layers read a prompt causally, and denoise the block after it in both
directions, conditioned on the logits of the step before."""

import dataclasses
from functools import partial

import jax
from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama
from .gemma4 import build_gemma4_projector
from .gemma4_text import GEMMA4_TEXT
from .gemma4_vision import GEMMA4_VISION

_FIXED = {
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 1,
}
"""Keys of Gemma 4 that this family's files do not have."""


def _build_decoder(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return GEMMA4_TEXT.build(hf.Config({**config, **_FIXED}), key=key)


def _map_text_names(config: hf.Config) -> hf.NameMap:
    return GEMMA4_TEXT.names(hf.Config({**config, **_FIXED}))


_TEXT = dataclasses.replace(
    GEMMA4_TEXT,
    name="diffusion_gemma_text",
    build=_build_decoder,
    names=_map_text_names,
    defaults={**hf.omit(GEMMA4_TEXT.declared, *_FIXED), "final_logit_softcapping": hf.optional_number(30.0)},
    find_ignored_tensors=None,
    kinds={},
)
_FACTS = hf.ImageTextFacts(
    wrapper=hf.Wrapper("diffusion_gemma_text", scales_logits=True),
    towers={"gemma4_vision": GEMMA4_VISION},
    projector=build_gemma4_projector,
    projector_names=lambda tower: {"embedding_projection": "projection"},
    image_keys={"image_token_id": 258880},
    texts={"diffusion_gemma_text": _TEXT},
)
_PREFIXES = hf.Prefixes("model.decoder.", "model.encoder.vision_tower", "model.encoder.embed_vision")


def _build_diffusion_gemma(config: hf.Config, *, key: Key[Array, ""]) -> hf.BlockDenoiser:
    parts_key, ffn_key = jax.random.split(key)
    parts = _FACTS.build(config, key=parts_key)
    _, text = _FACTS.read_text(config)
    ffn = hf.make_gated_mlp_factory(text)(key=ffn_key)
    norm = partial(hf.make_rms_norm_factory, text)
    return hf.BlockDenoiser(
        decoder=parts.decoder,
        tower=parts.tower,
        projector=parts.projector,
        self_conditioning=hf.SelfConditioning(norm()(), ffn, norm(scaled=False)()),
        canvas_scales=hf.make_canvas_scales(text["num_hidden_layers"]),
        canvas_length=config["canvas_length"],
        image_tokens=parts.image_tokens,
    )


def _map_diffusion_gemma_names(config: hf.Config) -> hf.NameMap:
    parts = dict(_FACTS.map_names(_PREFIXES, config))
    scale = parts.pop("model.decoder.layers.*.layer_scalar")
    conditioning = {"pre_norm": "signal_norm", **hf.prefixed("", "ffn", llama.GATED_MLP_NAMES)}
    return {
        **parts,
        **hf.prefixed("model.decoder.self_conditioning", "self_conditioning", conditioning),
        "model.encoder.language_model.layers.*.layer_scalar": scale,
        "model.decoder.layers.*.layer_scalar": "canvas_scales.*.scale",
    }


DIFFUSION_GEMMA = dataclasses.replace(
    hf.make_image_text_family(
        "diffusion_gemma",
        "DiffusionGemmaForBlockDiffusion",
        _FACTS,
        defaults={"canvas_length": 256},
        prefixes=(_PREFIXES,),
        required_values={"tie_word_embeddings": (None, True)},
        ignored_keys=frozenset({"boi_token_id", "eoi_token_id"}),
    ),
    build=_build_diffusion_gemma,
    names=_map_diffusion_gemma_names,
    variants=(),
)
