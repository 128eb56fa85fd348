"""CodeGen (Nijkamp et al., arXiv:2203.13474): GPT-J's layer, its projections stored together: queries, values and keys,
for each of the four devices that it was trained on."""

import dataclasses

from zoo.models.hf import grammar as hf

from . import gpt2, gptj


def _map_codegen_names(config: hf.Config) -> hf.NameMap:
    attention = {"qkv_proj": hf.fused("query", "value", "key", groups=4), "out_proj": "out"}
    block = {
        "ln_1": "mixer_norm",
        **hf.prefixed("attn", "attention", attention),
        **hf.prefixed("mlp", "mlp", {"fc_in": "up", "fc_out": "down"}),
    }
    shell = {"wte": "embedding", "ln_f": "norm", **hf.prefixed("h.*", "layers.*", block)}
    return {**hf.prefixed("transformer", "", shell), "lm_head": "head"}


CODEGEN = dataclasses.replace(
    gptj.GPTJ,
    name="codegen",
    architecture="CodeGenForCausalLM",
    names=_map_codegen_names,
    defaults={**gptj.GPTJ.declared, "rotary_dim": hf.optional_count(64)},
    ignored_tensors=(*gpt2.GPT2.ignored_tensors, r"\.attn\.causal_mask$"),
)
