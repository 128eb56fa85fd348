"""Qwen3, dense (Yang et al., arXiv:2505.09388): QK norm per head, and a head dim independent of `hidden_size`."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import make_head_norm_factory
from zoo.models.hf.kinds import optional_count
from zoo.models.hf.spec import Config, Family

from . import llama, qwen2


def _build_qwen3(config: Config, *, key: Key[Array, ""]) -> Decoder:
    bias = config["attention_bias"]
    return qwen2.build_windowed_decoder(
        config, key=key, bias=bias, out_bias=bias, qk_norm=make_head_norm_factory(config)
    )


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    build=_build_qwen3,
    names=llama.map_llama_names,
    defaults={**qwen2.DEFAULTS, "head_dim": optional_count(128), "attention_bias": False},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=llama.describe_dense,
)
