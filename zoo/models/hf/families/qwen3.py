"""Qwen3, dense (Yang et al., arXiv:2505.09388): QK norm per head, and a head dim independent of `hidden_size`."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama, qwen2


def build_qwen3(config: hf.Config, *, block: Any = hf.Block, key: Key[Array, ""]) -> hf.Decoder:
    """Build Qwen3, with blocks of this class, or of one each."""
    bias = config["attention_bias"]
    options = {"bias": bias, "out_bias": bias, "qk_norm": hf.make_head_norm_factory(config)}
    return qwen2.build_windowed_decoder(config, block=block, key=key, **options)


QWEN3 = hf.Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    build=build_qwen3,
    names=llama.map_llama_names,
    defaults={**qwen2.DEFAULTS, "head_dim": hf.optional_count(128), "attention_bias": False},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=hf.describe_dense,
)
