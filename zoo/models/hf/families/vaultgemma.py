"""VaultGemma (Google, arXiv:2510.15001): Gemma 2's layer without the norms after the sublayers, trained with
differential privacy."""

from jaxtyping import Array, Key

from zoo.models.decoder import Block, Decoder
from zoo.models.hf.spec import Config, Family, NameMap, prefixed

from . import gemma2, llama


def _build_vaultgemma(config: Config, *, key: Key[Array, ""]) -> Decoder:
    return gemma2.build_gemma2(config, block=Block, key=key)


def _map_vaultgemma_names(config: Config) -> NameMap:
    norms = {"input_layernorm": "mixer_norm", "pre_feedforward_layernorm": "ffn_norm"}
    return llama.map_llama_layers(prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), norms=norms)


VAULTGEMMA = Family(
    name="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    build=_build_vaultgemma,
    names=_map_vaultgemma_names,
    defaults=gemma2.GEMMA2.declared,
    aliases=gemma2.GEMMA2.aliases,
    required_values=gemma2.GEMMA2.required_values,
    ignored_keys=gemma2.GEMMA2.ignored_keys,
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
