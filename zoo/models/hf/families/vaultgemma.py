"""VaultGemma (Google, arXiv:2510.15001): Gemma 2's layer without the norms after the sublayers, trained with
differential privacy."""

import dataclasses

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import gemma2, llama


def _build_vaultgemma(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return gemma2.build_gemma2(config, block=hf.Block, key=key)


def _map_vaultgemma_names(config: hf.Config) -> hf.NameMap:
    norms = {"input_layernorm": "mixer_norm", "pre_feedforward_layernorm": "ffn_norm"}
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), norms=norms)


VAULTGEMMA = dataclasses.replace(
    gemma2.GEMMA2,
    name="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    build=_build_vaultgemma,
    names=_map_vaultgemma_names,
    defaults=gemma2.GEMMA2.declared,
)
