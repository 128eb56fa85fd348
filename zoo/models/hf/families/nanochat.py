"""nanochat (Karpathy, "nanochat", 2025): norms without parameters, one of them after the embedding; an MLP of squared
ReLUs; RoPE in the other direction; soft-capped logits. Queries and keys are normalized after RoPE in transformers: as
that norm has no parameters and a rotation keeps lengths, it is the same before. A magnitude m of scaled RoPE is undone
but for the norm's epsilon, which becomes the file's epsilon over m ** 2 before the rotation."""

import dataclasses

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf
from zoo.ops.rotary import ReversedRotation

from . import llama


def _build_nanochat(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config, scaled=False)
    bias = config["attention_bias"]
    rotary = hf.build_rotary(config)
    magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
    epsilon = config["rms_norm_eps"] / magnitude**2
    rotary = dataclasses.replace(rotary, scaling=ReversedRotation(rotary.scaling))
    qk_norm = hf.make_head_norm_factory(config, scaled=False, epsilon=epsilon)
    mixer = hf.make_attention_factory(config, rotary=rotary, qk_norm=qk_norm, bias=bias, out_bias=bias)
    layers = [(mixer, hf.make_mlp_factory(config, bias=False))] * config["num_hidden_layers"]
    options = {"embedding_norm": norm, "soft_cap": config["final_logit_softcapping"]}
    return hf.build_config_decoder(config, layers, norm, key=key, **options)


def _map_nanochat_names(config: hf.Config) -> hf.NameMap:
    return llama.map_llama_layers(hf.prefixed("mlp", "mlp", {"fc1": "up", "fc2": "down"}), norms={})


NANOCHAT = hf.Family(
    name="nanochat",
    architecture="NanoChatForCausalLM",
    build=_build_nanochat,
    names=_map_nanochat_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias", "head_dim"),
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "hidden_act": "relu2",
        "final_logit_softcapping": hf.optional_number(15.0),
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
